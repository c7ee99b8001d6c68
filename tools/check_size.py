"""Size budgets of the code, checked by `make lint`: what outgrows one is asking to be two things."""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOTS = ("src/roll", "packages/roll-sandbox/src/roll_sandbox")
FILE_LINES = 400
CLASS_LINES = 300
FUNCTION_LINES = 60
LOOP_LINES = 150
"""For a pipeline's `loop.py`: it reads like its paper, and construction lives beside it."""
STRING_KEYS = 11.0
"""Accesses by a literal key in 1,000 lines of all roots together. Data that is parsed once into a record needs none."""


def overruns(path: Path) -> Iterator[str]:
    """One message for every budget that the file at `path` exceeds."""
    source = path.read_text()
    num_lines = len(source.splitlines())
    is_loop = path.name == "loop.py" and path.parent.parent.name == "pipelines"
    budget = LOOP_LINES if is_loop else FILE_LINES
    if num_lines > budget:
        yield f"{path}:1: {'pipeline loop' if is_loop else 'file'} has {num_lines} lines, budget {budget}"
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.ClassDef):
            kind, budget = "class", CLASS_LINES
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kind, budget = "function", FUNCTION_LINES
        else:
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if num_lines > budget:
            yield f"{path}:{node.lineno}: {kind} {node.name} has {num_lines} lines, budget {budget}"


def num_string_keys(source: str) -> int:
    """Count accesses by a literal key: `row["name"]`, and `row.get("name")`, `pop` and `setdefault` alike.

    Types (`Literal["name"]`) and routes of a server (`@app.get("/name")`) are none.
    """
    found, nodes = 0, list(ast.walk(ast.parse(source)))
    routes = {id(each) for node in nodes for each in getattr(node, "decorator_list", ())}
    for node in nodes:
        if isinstance(node, ast.Subscript):
            key = None if ast.unparse(node.value) == "Literal" else node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and id(node) not in routes:
            key = node.args[0] if node.args and node.func.attr in ("get", "pop", "setdefault") else None
        else:
            continue
        found += isinstance(key, ast.Constant) and isinstance(key.value, str)
    return found


def share(sources: Iterable[str]) -> float:
    """Return the accesses by a literal key in 1,000 lines of `sources`."""
    sources = list(sources)
    num_lines = sum(len(source.splitlines()) for source in sources)
    return 1000 * sum(map(num_string_keys, sources)) / max(num_lines, 1)


def main(*given: str) -> int:
    """Print every overrun under the roots, both distributions by default; the exit code says whether there was one."""
    roots = {root: {path: path.read_text() for path in sorted(Path(root).rglob("*.py"))} for root in given or ROOTS}
    files = {path: source for found in roots.values() for path, source in found.items()}
    messages = [message for path in files for message in overruns(path)]
    keys = f"{share(files.values()):.1f} string keys in 1,000 lines"
    if share(files.values()) > STRING_KEYS:
        messages.append(f"{keys}, budget {STRING_KEYS}")
    of_roots = ", ".join(f"{root} {share(found.values()):.1f}" for root, found in roots.items())
    print("\n".join(messages) or f"Size budgets kept by {len(files)} files; {keys} ({of_roots}).")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
