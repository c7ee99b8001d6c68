"""Workers of a sandbox service as actors of a Ray cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from sandbox.conftest import LIMITS, missing, served

from roll.errors import PlacementError
from roll_sandbox import PythonCode, SandboxAccessError, SandboxSpec, SandboxUnavailableError, connect

pytest.importorskip("ray")

import ray

from roll.cluster.sandbox_workers import start_workers

pytestmark = pytest.mark.ray


async def test_sandbox_ray_sandboxes_run_on_the_machines_of_a_ray_cluster(tmp_path: Path) -> None:
    if reason := missing("service"):
        pytest.skip(reason)
    with pytest.raises(PlacementError, match="connect with"):
        start_workers("http://127.0.0.1:9", "x")
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with served(tmp_path, "--runtime", "none") as (url, token):
            refused = start_workers(url, "roll_x", warm=0)
            with pytest.raises(SandboxAccessError, match="rejected the token"):
                await refused.wait()
            await refused.close()
            workers = start_workers(url, token, warm=0, drain_s=1.0)
            (name,) = workers.names
            async with connect(url, token, spec=SandboxSpec(limits=LIMITS), warm=0) as sandboxes:
                sandbox = None
                async with asyncio.timeout(120):
                    while sandbox is None:
                        try:
                            sandbox = await sandboxes.create()
                        except SandboxUnavailableError:
                            await asyncio.sleep(0.05)
                assert (await sandbox.execute(PythonCode(source="print(1)"))).stdout == b"1\n"
                headers = {"Authorization": f"Bearer {token}"}
                async with aiohttp.ClientSession(headers=headers) as http:
                    async with http.get(f"{url}/v1/sandboxes/{sandbox.name}") as answer:
                        assert (await answer.json())["worker"] == name
                    await workers.close()
                    async with http.get(f"{url}/v1/workers") as answer:
                        assert await answer.json() == []
    finally:
        ray.shutdown()
