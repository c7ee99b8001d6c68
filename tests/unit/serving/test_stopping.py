"""The command `roll serve` ends with a signal, and at once with a second one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll.cli.serve import _serve
from roll.serving import ServeSettings, startup


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_serving_stops_with_a_signal_and_a_second_one_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, number: signal.Signals
) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    actions: list[Any] = []

    @asynccontextmanager
    async def open_server(settings: ServeSettings, report: Any) -> AsyncIterator[Any]:
        died = asyncio.get_running_loop().create_future()
        os.kill(os.getpid(), number)
        yield SimpleNamespace(url="http://x", service=SimpleNamespace(trainer=SimpleNamespace(died=died)))
        actions.append([signal.getsignal(each) for each in before])  # while the trainer is closed

    monkeypatch.setattr(startup, "open_server", open_server)
    try:
        await _serve(ServeSettings(model="x", keys={"tml-12345678": "a"}, directory=tmp_path), "")
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert actions == [[signal.SIG_DFL, signal.SIG_DFL]]
    assert "A second signal ends the process at once" in capsys.readouterr().out
