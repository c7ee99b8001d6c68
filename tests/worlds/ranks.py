"""Processes for the ranks of a trainer.

They are forked from a server that has imported PyTorch and the trainer once: importing takes seconds, and the tests
start some fifty ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from worlds.forked import prepare_server

__all__ = ["run_ranks"]


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int) -> None:
    """Call `function(rank, *arguments)` in a process for each rank, and wait for all of them.

    Raises:
        ProcessRaisedException: a rank failed; the others are ended.
    """
    prepare_server()
    mp.start_processes(function, arguments, nprocs=num_ranks, start_method="forkserver")  # type: ignore[no-untyped-call]
