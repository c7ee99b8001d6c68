"""Run directories that a dashboard shows in tests, and what it answers."""

from __future__ import annotations

import json
import shutil
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image

from roll.media import MediaStore

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script><b>not bold</b>'


@dataclass(frozen=True)
class Site:
    """A dashboard that runs, and the directory that it shows."""

    address: str
    runs: Path

    def get(self, path: str) -> Any:
        """What `/api/<path>` answers."""
        with urllib.request.urlopen(f"{self.address}api/{path}", timeout=60) as answer:
            return json.load(answer)

    def run(self, name: str) -> str:
        """The id of a run, by the name of its directory."""
        return next(r["id"] for r in self.get("runs") if r["path"].endswith(f"/{name}"))


def copy(source: Path, target: Path, num_steps: int) -> None:
    """The run as it was after `num_steps` steps; later calls let it grow."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.yaml", target / "config.yaml")
    (target / "rollouts").mkdir(exist_ok=True)
    for path in sorted((source / "rollouts").iterdir()):
        if int(path.stem.rsplit("-", 1)[1]) <= num_steps:
            shutil.copy(path, target / "rollouts" / path.name)
    lines = (source / "metrics.jsonl").read_text().splitlines(keepends=True)
    have = (target / "metrics.jsonl").read_text().count("\n") if (target / "metrics.jsonl").exists() else 0
    with (target / "metrics.jsonl").open("a") as file:
        file.writelines(line for line in lines[have:] if json.loads(line)["step"] <= num_steps)


def add_images(run: Path) -> dict[str, str]:
    """Mention three images in the prompt of the first training row; returns their digests: shown, corrupted,
    missing."""
    store = MediaStore(run / "media")
    image = Image.new("RGB", (600, 300), "red")
    digests = {"shown": store.add_image(image), "corrupted": store.add_image(image.rotate(90)), "missing": "0f" * 32}
    (run / "media" / digests["corrupted"][:2] / digests["corrupted"]).write_bytes(b"no image")
    path = sorted((run / "rollouts").glob("step-*.parquet"))[0]
    rows = pq.read_table(path)
    columns = rows.to_pydict()
    texts = [f"{name} [image {digest[:12]}]" for name, digest in digests.items()]
    columns["messages"][0] = [{"role": "user", "content": f"{HOSTILE} {text}"} for text in texts]
    pq.write_table(type(rows).from_pydict(columns, schema=rows.schema), path)
    return digests


def make_hostile(run: Path) -> None:
    path = sorted((run / "rollouts").glob("step-*.parquet"))[0]
    rows = pq.read_table(path)
    columns = rows.to_pydict()
    for name in ("text", "prompt", "domain", "verdict", "answer", "cause"):
        columns[name][0] = HOSTILE
    columns["messages"][0] = [{"role": HOSTILE, "content": HOSTILE}]
    pq.write_table(type(rows).from_pydict(columns, schema=rows.schema), path)
