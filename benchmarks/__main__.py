"""Lists the benchmarks of this directory, or runs one: `make bench` and `make bench NAME=step ARGS="…"`."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent


def scripts() -> dict[str, Path]:
    """Return the script of each benchmark by the name that `make bench NAME=…` takes, `step` for `bench_step.py`."""
    paths = sorted(path for path in HERE.glob("*.py") if not path.name.startswith(("_", "mutation_")))
    return {path.stem.removeprefix("bench_").replace("_", "-"): path for path in paths}


def main(name: str, *arguments: str) -> int:
    """Replace this process with the benchmark `name`, or list all if it is empty; return 2 if `name` is not known."""
    known = scripts()
    if name in known:
        os.execv(sys.executable, [sys.executable, str(known[name]), *arguments])
    if name:
        print(f"make bench: NAME={name} is not a benchmark; `make bench` without NAME lists them", file=sys.stderr)
        return 2
    for each, path in known.items():
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        print(f"  make bench NAME={each:<22} {docstring.splitlines()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or [""])))
