"""Every notebook runs from its first cell to its last, inside an event loop, as Jupyter has one."""

import ast
import asyncio
import inspect
import json

import pytest
from docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def cells(path) -> list[str]:
    """The code of a notebook, cell by cell."""
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_docs_notebooks_are_kept_without_outputs():
    found = [json.loads(path.read_text()) for path in NOTEBOOKS]
    assert len(found) >= 3
    assert all(notebook["nbformat"] == 4 for notebook in found)
    assert all(not cell.get("outputs") for notebook in found for cell in notebook["cells"])


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_docs_notebooks_a_notebook_runs(path, workplace):
    names: dict = {"__name__": "__main__"}

    async def session() -> None:
        for number, code in enumerate(cells(path)):
            result = eval(compile(code, f"{path.name}:{number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            if inspect.isawaitable(result):
                await result

    asyncio.run(session())
