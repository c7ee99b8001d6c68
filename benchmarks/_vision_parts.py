"""The command line and the figures that the benchmarks `vision` and `gui` have in common.

The parts of a benchmark take long, and a later call continues with the models of an earlier one. Figures are therefore
kept next to the models, and each call adds its own.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _report import measure_matmul_rate, report


def build_parser(description: str | None, parts: Sequence[str], **defaults: Any) -> argparse.ArgumentParser:
    """Build a parser with the options that both benchmarks have.

    Args:
        description: The docstring of the benchmark.
        parts: Names of the parts; all run by default.
        **defaults: Values of the options that are not given.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="models, data and runs")
    parser.add_argument("--parts", nargs="*", default=list(parts), choices=parts, help="parts to run")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3], help="seeds of GRPO")
    parser.add_argument("--tower-seconds", type=float, help="CPU time for the tower")
    parser.add_argument("--rate", type=float, help="learning rate of GRPO")
    parser.add_argument("--steps", type=int, help="steps of GRPO")
    parser.set_defaults(**defaults)
    return parser


class Figures:
    """The figures of a benchmark, in `figures.json` of the directory with its models.

    Args:
        name: The name of the benchmark.
        directory: The directory, which is created.
        **known: Figures that no part measures.
    """

    def __init__(self, name: str, directory: Path, **known: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._name, self._path, self._known = name, directory / "figures.json", known
        self.add("matmul_gflops", measure_matmul_rate())

    def add(self, name: str, value: Any) -> None:
        """Keep a figure, and print it."""
        # Seeds may run in several processes: read what others wrote, and never show them half a file.
        partial = self._path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(self._load() | {name: value}, indent=2))
        partial.replace(self._path)
        print(name, json.dumps(value), flush=True)

    def report(self) -> None:
        """Write all figures to `results/`."""
        report(self._name, self._load())

    def _load(self) -> dict[str, Any]:
        return json.loads(self._path.read_text()) if self._path.exists() else self._known
