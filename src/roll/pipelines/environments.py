"""Starts every environment once before a run, on its host, so that errors are reported early."""

from __future__ import annotations

from collections.abc import Sequence

from roll.cluster.pool import LocalWorkerPool
from roll.config.data import DataConfig, EnvironmentData
from roll.config.sandbox import SandboxConfig
from roll.envs.base import ResetResult
from roll.envs.hosted_tools import HostedToolEnv
from roll.envs.hosting import EnvHosts
from roll.envs.image_storage import ImageStorage
from roll.envs.registration import is_user_class
from roll.envs.run_hosts import open_hosts
from roll.errors import DataError, InfraError
from roll.models.multimodal import MediaInputs
from roll.types import get_text, list_media

__all__ = ["collect_first_observations"]


async def collect_first_observations(
    entries: Sequence[DataConfig], sandbox: SandboxConfig, media: MediaInputs | None = None
) -> dict[str, ResetResult]:
    """Return the first observation and info of every environment's first episode, by domain.

    Args:
        entries: Data sources; only environments among them are started.
        sandbox: Configuration of sandboxes.
        media: Images of the run; `None` for a text-only model.

    Raises:
        UserError: An environment does not exist, rejects its options, or does not start.
    """
    found: dict[str, ResetResult] = {}
    own = [entry for entry in entries if isinstance(entry, EnvironmentData)]
    if not own:
        return found
    pool = LocalWorkerPool(1)
    images = None if media is None else ImageStorage(media, pool)
    try:
        async with open_hosts(pool, sandbox, images) as hosts:
            for entry in own:
                found[entry.domain or entry.source] = await _get_first_observation(hosts, entry)
    finally:
        await pool.close()
    return found


async def _get_first_observation(hosts: EnvHosts, entry: EnvironmentData) -> ResetResult:
    settings = entry.build_settings(0)
    try:
        async with hosts.open(settings) as env:
            observation, info = await hosts.store_images(await env.reset(settings.seed), settings.name)
            if is_user_class(settings.name):
                await env.step("")  # an environment must respond to any action
            if isinstance(env, HostedToolEnv):
                await env.check()
    except InfraError as error:
        raise DataError(
            f"{error}. Every episode would fail with this error; `roll env check` shows details."
        ) from error
    if list_media(observation) and (text := [each.type for each in entry.reward if each.reads_prompt_text]):
        raise DataError(
            f"environment '{entry.environment}' returns images, but its reward '{text[0]}' supports only text: choose "
            "another reward."
        )
    if not list_media(observation) and not get_text(observation).strip():
        raise DataError(
            f"environment '{entry.environment}' begins its first episode with {observation!r}: the first observation "
            "must contain the task."
        )
    return observation, info
