"""Ways in which a file of a run directory may be wrong, by accident or on purpose."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["spoil"]

TEXTS = ("[" * 50_000, '{"a":' * 50_000, "a: &a [*a]\n", "- " * 5000, "\x00" * 100, "!!python/x 1")
EVENTS: tuple[dict[str, Any], ...] = (
    {"ts": -1},
    {"ts": 0, "ph": "e", "name": "x"},
    {"ts": 1e17, "ph": "X", "name": "step 1", "dur": 1e14},
)
ROWS = ({"step": 10**30, "kind": "train"}, {"step": 5, "kind": "train", "sync/x": {}, "alarm/x": -1e308}, 5, None)
COLUMNS = ("reward", "draw_id", "token_ids", "text", "policy_versions", "turns", "status", "correct", "components")
CELLS: tuple[list[Any], ...] = (
    [None], ["x"], [float("nan")], [[1]], [-(2**62)], [b"\xff"], [{"start": "x"}], [["x"]],
)  # fmt: skip
MOST = 12


def spoil(run: Path, rng: random.Random, secret: Path) -> None:
    """Harm one file of a run; `secret` is what links may lead to."""
    files = sorted(path for path in run.rglob("*") if path.is_symlink() or not path.is_dir())
    path = rng.choice([*files, run / "config.yaml", run / "metrics.jsonl", run / "rollouts" / "step-000001.parquet"])
    content = path.read_bytes() if path.is_file() else b""
    way = rng.randrange(MOST)
    if way == 8:
        path = run / "config.yaml"
    elif way == 9:
        path = run / "rollouts" / "step-000002.parquet"
    elif way == 10:
        path = run / "metrics.jsonl"
    elif way == 11:
        path = run / "trace.json"
    _remove(path)
    if way < 3:
        path.write_bytes(_harmed(content, way, rng))
    elif way == 3:
        path.symlink_to(secret)
    elif way == 4:
        path.mkdir(parents=True)
    elif way == 5:
        os.mkfifo(path)
    elif way == 6:
        path.symlink_to(path)
    elif way == 7:
        path.write_text(rng.choice(TEXTS))
    elif way == 8:
        path.write_text(_bomb())
    elif way == 9:
        names = rng.sample(COLUMNS, rng.randint(1, len(COLUMNS)))
        pq.write_table(pa.table({name: rng.choice(CELLS) for name in names}), path)
    elif way == 10:
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    else:
        event = json.dumps(rng.choice(EVENTS))
        path.write_text(f"[\n{event},\n{event}\n]\n")


def _harmed(content: bytes, way: int, rng: random.Random) -> bytes:
    """Cut off, changed in places, or something else altogether."""
    if way == 0:
        return content[: rng.randrange(len(content) + 1)]
    if way == 1 and content:
        changed = bytearray(content)
        for _ in range(rng.randint(1, 40)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    return rng.randbytes(rng.randrange(5000))


def _bomb() -> str:
    """Nine lines that stand for 43 million values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    return "\n".join(lines) + "\n"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
