"""When engines release the devices that they share with trainers."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from roll.pipelines.colocation import SharedDevices


def build_engine(engine_id: str, kv_capacity: int | None) -> Any:
    return SimpleNamespace(engine_id=engine_id, load=lambda: SimpleNamespace(kv_capacity=kv_capacity))


def test_shared_devices_stream_training_says_why_it_never_starts_early(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        proxy: Any = SimpleNamespace(serving_engines=[build_engine("shared", 5), build_engine("kept", None)])
        trainer: Any = SimpleNamespace()
        devices = SharedDevices(trainer, [trainer], ["shared"], "stream_training")
        buffer: Any = []
        devices.attach(proxy, buffer)
        assert not devices.is_stream_due(4) and not devices.is_stream_due(8)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        "cluster.sharing stream_training releases the devices only when a batch is complete, becau"
    )
    assert "engine kept does not report the size of its KV cache" in message


@pytest.mark.parametrize(("capacity", "is_due"), [(100, True), (0, False)])
def test_shared_devices_stream_training_starts_if_the_other_requests_fit(capacity: int, is_due: bool) -> None:
    async def main() -> bool:
        proxy: Any = SimpleNamespace(serving_engines=[build_engine("kept", capacity)])
        trainer: Any = SimpleNamespace()
        devices = SharedDevices(trainer, [trainer], ["shared"], "stream_training")
        run: Any = SimpleNamespace(num_finished=3, num_stopped=1, draw=SimpleNamespace(token_ids=[1] * 10))
        buffer: Any = [SimpleNamespace(run=run, is_taken=False)]
        devices.attach(proxy, buffer)
        group = SimpleNamespace(rollouts=[SimpleNamespace(token_ids=[1] * 90)])
        devices.record_stream(SimpleNamespace(groups=[group]), wait_s=0.0, step_s=1.0)  # type: ignore[arg-type]
        return devices.is_stream_due(4)

    assert asyncio.run(main()) is is_due
