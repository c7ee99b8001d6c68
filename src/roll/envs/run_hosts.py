"""Opens the hosts for the environments of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from roll.config.sandbox import SandboxConfig
from roll.envs.hosted_tools import ToolBuilder
from roll.envs.hosting import EnvHosts
from roll.envs.http_host import HttpHost
from roll.envs.image_storage import ImageStorage
from roll.envs.process_host import PoolHost
from roll.envs.sandbox_host import SandboxHost
from roll.protocols import WorkerPool

__all__ = ["open_hosts"]


@asynccontextmanager
async def open_hosts(
    pool: WorkerPool, sandbox: SandboxConfig, images: ImageStorage | None = None
) -> AsyncIterator[EnvHosts]:
    """Open all hosts of a run, yield them, and close them at the end. A host starts with its first environment.

    Args:
        pool: The run's worker pool.
        sandbox: The sandbox settings.
        images: The storage of images in observations; `None` if the model reads only text.
    """
    isolation = {"runtime": sandbox.runtime, "trust_programs": sandbox.trust_programs, "image": sandbox.image}
    if sandbox.url is not None:
        isolation |= {"url": sandbox.url, "token_env": sandbox.token_env, "ca_file": sandbox.ca_file}
    hosts = EnvHosts(
        {"pool": PoolHost(pool), "sandbox": SandboxHost(sandbox), "http": HttpHost()},
        ToolBuilder(pool, isolation),
        images,
    )
    try:
        yield hosts
    finally:
        await hosts.close()
