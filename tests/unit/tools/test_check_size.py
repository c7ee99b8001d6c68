"""The size budgets, on files made to lie on either side of them."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "check_size.py"


def check(root: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.replace(f"{root}/", "").replace(str(root), "root")


def write(root: Path, name: str, source: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


def function(num_lines: int, indent: str = "") -> str:
    return f"{indent}def f():\n" + f"{indent}    pass\n" * (num_lines - 1)


@pytest.mark.parametrize(
    ("name", "within", "beyond", "message"),
    [
        ("a.py", "x = 1\n" * 400, "x = 1\n" * 401, "a.py:1: file has 401 lines, budget 400"),
        ("a.py", "\n" + function(60), "\n" + function(61), "a.py:2: function f has 61 lines, budget 60"),
        (
            "a.py",
            "class C:\n" + "    x = 1\n" * 299,
            "class C:\n" + "    x = 1\n" * 300,
            "a.py:1: class C has 301 lines, budget 300",
        ),
        (
            "pipelines/online/loop.py",
            "x = 1\n" * 150,
            "x = 1\n" * 151,
            "pipelines/online/loop.py:1: pipeline loop has 151 lines, budget 150",
        ),
    ],
    ids=["file", "function", "class", "pipeline loop"],
)
def test_check_size_a_budget_is_kept_at_its_limit_and_broken_one_line_later(tmp_path, name, within, beyond, message):
    write(tmp_path, name, within)
    assert check(tmp_path) == (0, "Size budgets kept by 1 files; 0.0 string keys in 1,000 lines (root 0.0).\n")
    write(tmp_path, name, beyond)
    assert check(tmp_path) == (1, message + "\n")


def test_check_size_methods_and_async_functions_have_the_budget_of_functions(tmp_path):
    write(tmp_path, "a.py", "class C:\n" + function(61, indent="    "))
    write(tmp_path, "b.py", "async " + function(61))
    assert check(tmp_path) == (
        1,
        "a.py:2: function f has 61 lines, budget 60\nb.py:1: function f has 61 lines, budget 60\n",
    )


def test_check_size_the_setup_beside_a_pipeline_has_the_budget_of_a_file(tmp_path):
    write(tmp_path, "pipelines/rlvr_setup.py", "x = 1\n" * 151)
    write(tmp_path, "pipelines/__init__.py", "x = 1\n" * 151)
    assert check(tmp_path)[0] == 0


def test_check_size_accesses_by_a_literal_key_have_a_budget(tmp_path):
    budget = runpy.run_path(str(SCRIPT))["STRING_KEYS"]
    keys = ['x["a"]', 'x.get("a", 0)', 'x.pop("a")', 'x.setdefault("a", 0)', 'x["a"] = 1']
    others = ["x[0]", "x[key]", "x.get(key)", "y = {'a': 1}", "f('a')", "get('a')", "z: Literal['a']"]
    write(tmp_path, "a.py", "\n".join([*keys, *others, "@app.get('/a')", "def f(): ..."]) + "\n" * 187)
    share = 1000 * len(keys) / 200
    assert share > budget
    assert check(tmp_path) == (1, f"{share:.1f} string keys in 1,000 lines, budget {budget}\n")
    write(tmp_path, "b.py", "\n" * 400)
    write(tmp_path, "c.py", "\n" * 400)
    assert check(tmp_path) == (0, "Size budgets kept by 3 files; 5.0 string keys in 1,000 lines (root 5.0).\n")
