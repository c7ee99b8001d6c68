"""`roll reward serve`: opens rewards and serves them until a signal arrives.

configuration, Python file or type of reward ──► rewards by domain ──► `RewardServer` ──► SIGTERM: answer, then stop
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import click

from roll.cli.score_file import parse_rewards, read_rewards_by_domain
from roll.config.base import FUNCTION_PATTERN
from roll.config.rewards import PythonReward, RewardConfig
from roll.config.run import RunConfig
from roll.config.sandbox import SandboxConfig
from roll.errors import ConfigError
from roll.process_environment import prepare_environment
from roll.running import run_to_end

__all__ = ["ServiceSettings", "serve_rewards"]


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Settings of the service: see `roll reward serve --help`."""

    host: str
    port: int
    token_env: str | None
    num_workers: int | None
    max_pending: int
    drain_s: float


def serve_rewards(target: str, overrides: Sequence[str], settings: ServiceSettings) -> None:
    """Serve rewards until SIGTERM or SIGINT.

    Args:
        target: A configuration, a Python function (`file.py:function`), or a reward as in a configuration.
        overrides: Overrides of the configuration.
        settings: Settings of the service.

    Raises:
        UserError: A reward cannot be opened, or the service cannot listen on the address.
    """
    lists, config = _find_rewards(target, overrides)
    token = _read_token(settings.token_env)
    run_to_end(_serve(lists, config, settings, token))


def _find_rewards(target: str, overrides: Sequence[str]) -> tuple[dict[str, list[RewardConfig]], RunConfig | None]:
    """Return the rewards of each domain, and the configuration that defines them, if any."""
    if target.endswith((".yaml", ".yml", ".json")):
        return read_rewards_by_domain(target, overrides, ())
    if overrides:
        raise ConfigError(f"'{overrides[0]}' overrides a configuration, but '{target}' is not a YAML file.")
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise ConfigError(f"'{target}' does not exist: specify a reward function as FILE.py:FUNCTION.")
        raise ConfigError(
            f"'{target}' does not name a function: write '{target}:FUNCTION', for example '{target}:reward'."
        )
    if re.fullmatch(FUNCTION_PATTERN, target):
        return {"": [PythonReward(type="python", function=target)]}, None
    return {"": parse_rewards([target])}, None


def _read_token(variable: str | None) -> str:
    if variable is None:
        return ""
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(
            f"the environment variable {variable} of --token-env is not set: set it to the token that clients send."
        )
    return token


async def _serve(
    rewards_by_name: Mapping[str, Sequence[RewardConfig]],
    config: RunConfig | None,
    settings: ServiceSettings,
    token: str,
) -> None:
    from roll.cluster.pool import LocalWorkerPool
    from roll.rewards.opening import open_reward_lists
    from roll.rewards.remote.server import RewardServer

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        pool = LocalWorkerPool(settings.num_workers or os.cpu_count() or 1)
        stack.push_async_callback(pool.close)
        if config is None:
            opening = open_reward_lists(rewards_by_name, SandboxConfig(), pool)
        else:
            from roll.cluster.local import LocalCluster
            from roll.pipelines.judge import start_scoring

            prepare_environment()
            opening = start_scoring(config, LocalCluster(), pool)
        rewards = await stack.enter_async_context(opening)
        server = RewardServer(
            rewards,
            rewards_by_name,
            pool,
            host=settings.host,
            port=settings.port,
            token=token,
            max_pending=settings.max_pending,
            drain_s=settings.drain_s,
        )
        try:
            await stack.enter_async_context(server)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {settings.host}:{settings.port}: {error}. Choose another --host or --port."
            ) from error
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        click.echo(f"Serving {_describe_rewards(rewards_by_name)} at {server.url}. Stop with Ctrl-C.")
        if not token and settings.host not in ("127.0.0.1", "localhost", "::1"):
            click.echo("Other machines can use the service without a token: set --token-env to require one.", err=True)
        await stop.wait()
        for number in (signal.SIGTERM, signal.SIGINT):  # a second signal ends the process at once
            loop.remove_signal_handler(number)
        click.echo(f"Stopping: waiting up to {settings.drain_s:g} s for running requests.")


def _describe_rewards(rewards_by_name: Mapping[str, Sequence[RewardConfig]]) -> str:
    """Describe the rewards in one line: `math`, or `gsm8k (math), code (code + format)`."""
    names = {
        domain: " + ".join(config.name or config.type for config in configs)
        for domain, configs in rewards_by_name.items()
    }
    return ", ".join(f"{domain} ({name})" if domain else f"the reward '{name}'" for domain, name in names.items())
