"""Sources, peers and small engines for the tests of weight sync."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch

from roll.types import WeightUpdate
from roll.weights import Sender
from roll.weights.broadcast import build_engine_update

TENSORS = {
    "bfloat16 matrix": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4) / 8,
    "transposed": torch.arange(15.0).reshape(3, 5).T,
    "every other": torch.arange(10, dtype=torch.float64)[::2],
    "expanded": torch.tensor([[1.5], [2.5]]).expand(2, 3),
    "scalar": torch.tensor(3.25),
    "empty": torch.empty(0, 5, dtype=torch.float16),
    "flags": torch.tensor([True, False, True]),
    "n" * 4000: torch.tensor([7, -7]),
    "large": torch.arange(5000, dtype=torch.int16),
    "special": torch.tensor([float("nan"), float("inf"), -0.0, 0.0]),
}
"""One of each kind that has ever been a special case."""


class DictSource:
    """A `WeightSource` over a dictionary."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())

    def names(self) -> Sequence[str]:
        return list(self.tensors)


class Peer:
    """A process that runs `weight_peer.py`."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("weight_peer.py")
        self.process = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ready(self) -> Self:
        """Itself, once it hears commands: importing torch may take longer than a sync may."""
        assert self.answer() == "ready"
        return self

    def tell(self, *command: Any) -> None:
        """Send a command; its answer is read later."""
        pickle.dump(command, self.process.stdin)
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The next answer; `EOFError` if the process has ended."""
        return pickle.load(self.process.stdout)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def transfer(
    sender: Sender, tensors: Mapping[str, torch.Tensor], transport: str, peers: Sequence[Peer], version: int = 1
) -> tuple[dict[str, int], list[Any]]:
    """Sync to all peers at once.

    Returns:
        The sender's checksums, and every peer's answer.
    """
    ids = tuple(f"engine-{i}" for i in range(len(peers)))
    update = sender.stage(DictSource(tensors), version, transport)
    assert update is not None
    for engine_id, peer in zip(ids, peers, strict=True):
        peer.tell("receive", build_engine_update(update, engine_id, ids), {"timeout_s": 20.0}, None)
    failed = True
    try:
        checksums = sender.send()
        answers = [peer.answer() for peer in peers]
        failed = False
        return checksums, answers
    finally:
        sender.release(failed=failed)


def send_aside(sender: Sender) -> Any:
    """Start `send` in a thread; `result()` waits for it."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(sender.send)
    executor.shutdown(wait=False)
    return future


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def offer(tensors: Mapping[str, torch.Tensor], sender: Sender) -> WeightUpdate:
    """Stage in this process."""
    update = sender.stage(DictSource(tensors), 1, "in_process")
    assert update is not None
    return update
