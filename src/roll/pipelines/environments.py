"""Trial of environments before a run starts, where they will run, so that errors are reported early."""

from __future__ import annotations

from collections.abc import Sequence

from roll.cluster.pool import LocalWorkerPool
from roll.config.data import DataConfig, EnvironmentData
from roll.config.sandbox import SandboxConfig
from roll.envs.base import Started
from roll.envs.equipping import EquippedEnv
from roll.envs.hosting import EnvHosts
from roll.envs.places import open_hosts
from roll.envs.registration import is_own
from roll.envs.sanitize import check_consumed
from roll.errors import DataError, InfraError
from roll.types import text_of

__all__ = ["first_observations"]


async def first_observations(
    entries: Sequence[DataConfig], sandbox: SandboxConfig, pipeline: str = ""
) -> dict[str, Started]:
    """Return the first observation and info of every environment's first episode, by domain.

    Args:
        entries: Data sources, of which those that are environments are started.
        sandbox: Configuration of sandboxes.
        pipeline: Name of the pipeline, for messages.

    Raises:
        UserError: An environment does not exist, refuses its options, or does not start.
    """
    found: dict[str, Started] = {}
    own = [entry for entry in entries if isinstance(entry, EnvironmentData)]
    if not own:
        return found
    pool = LocalWorkerPool(1)
    try:
        async with open_hosts(pool, sandbox) as hosts:
            for entry in own:
                found[entry.domain or entry.source] = await _first_observation(hosts, entry, pipeline)
    finally:
        await pool.close()
    return found


async def _first_observation(hosts: EnvHosts, entry: EnvironmentData, pipeline: str) -> Started:
    settings = entry.settings(0)
    try:
        async with hosts.open(settings) as env:
            observation, info = await env.reset(settings.seed)
            if is_own(settings.name):
                await env.step("")  # an environment must respond to any action
            if isinstance(env, EquippedEnv):
                await env.check()
    except InfraError as error:
        raise DataError(f"{error}. So its episodes would fail; `roll env check` says more.") from error
    check_consumed(observation, entry.environment, pipeline)
    if not text_of(observation).strip():
        raise DataError(
            f"environment '{entry.environment}' begins its first episode with {observation!r}: the first observation "
            "says what is asked."
        )
    return observation, info
