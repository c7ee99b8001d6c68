"""Which part of an answer is the program: fences as models write them, examples, sessions, hostile texts."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.rewards.code.extract import extract_code
from roll.rewards.code.tasks import parse_task

F = "def f(x):\n    return x+1\n"


def indented(text: str, by: str) -> str:
    return "".join(f"{by}{line}\n" for line in text.splitlines())


FENCED = {
    "in a list item": "1. do:\n" + indented(f"```python\n{F}```", "   ") + "2. done",
    "behind a list marker": "1. ```python\n" + indented(f"{F}```", "   "),
    "behind a bullet": "- ```python\n" + indented(f"{F}```", "  "),
    "indented by a tab": indented(f"```python\n{F}```", "\t"),
    "indented by four": indented(f"```python\n{F}```", "    "),
    "content alone is indented": "```python\n" + indented(F, "    ") + "```",
    "fence alone is indented": f"   ```python\n{F}   ```",
    "quoted": indented(f"```python\n{F}```", "> "),
    "quoted twice": indented(f"```python\n{F}```", ">> "),
    "byte order mark before the text": f"\ufeff```python\n{F}```",
    "byte order mark before the code": f"```python\n\ufeff{F}```",
    "byte order mark and no fence": f"\ufeff{F}",
    "closed on the last line of code": f"```python\n{F.rstrip()}```",
    "version": f"```python3.11\n{F}```",
    "version behind a space": f"```Python 3\n{F}```",
    "braces": f"```{{python}}\n{F}```",
    "attributes": f'```python title="f.py"\n{F}```',
    "file name": f"```python:main.py\n{F}```",
    "space before the tag": f"``` python\n{F}```",
    "tag that names no language": f"```code\n{F}```",
    "tag that is a file": f"```solution.py\n{F}```",
    "session behind it": f"```python\n{F}```\nFor example:\n```python\n>>> f(1)\n2\n```",
    "session before it": f"```python\n>>> f(1)\n2\n```\n```python\n{F}```",
}


@pytest.mark.parametrize("text", FENCED.values(), ids=FENCED.keys())
def test_code_reward_extract_code_is_found_in_fences_as_models_write_them(text: str) -> None:
    assert extract_code(text, "python") == F


def test_code_reward_extract_code_of_a_session_counts_without_its_prompts_where_there_is_nothing_else() -> None:
    session = ">>> def f(x):\n...     return x+1\n...\n>>> f(1)\n2\n"
    typed = "def f(x):\n    return x+1\n\nf(1)\n"
    assert extract_code(f"```python\n{session}```", "python") == typed
    assert extract_code(f"```pycon\n{session}```", "python") == typed
    assert extract_code(session, "python") == typed


USE = "print(f(1))\n"


@pytest.mark.parametrize(
    ("blocks", "wanted"),
    [
        ([("python", F), ("python", USE)], F),
        ([("", F), ("python", USE)], F),
        ([("python", "def f(x): return 0\n"), ("python", F), ("python", USE)], F),  # the last one that defines it
        ([("python", F), ("python", "f = lambda x: x + 1\n")], "f = lambda x: x + 1\n"),
        ([("python", F), ("python", "f == 3\n")], F),
        ([("python", "g = 1\n"), ("python", USE)], USE),  # neither defines it: the last one
        ([("python", USE), ("", "2\n")], USE),
        ([("text", F)], None),
    ],
)
def test_code_reward_extract_code_is_the_block_that_defines_what_the_tests_use(
    blocks: list[tuple[str, str]], wanted: str | None
) -> None:
    text = "\n".join(f"```{tag}\n{content}```" for tag, content in blocks)
    assert extract_code(text, "python", names={"f"}) == wanted


def test_code_reward_extract_code_of_a_task_with_input_is_the_block_that_reads_it() -> None:
    program, example = "n = int(input())\nprint(n)\n", "print('Input: 5')\n"
    text = f"```python\n{program}```\nAn example:\n```python\n{example}```"
    assert extract_code(text, "python", reads_input=True) == program
    assert extract_code(text, "python") == example
    assert extract_code(f"```python\n{example}```", "python", reads_input=True) == example


@pytest.mark.parametrize(
    ("tests", "settings", "names"),
    [
        (["assert f(1) == 2", "assert abs(f(2) - g.x) < h(1)"], {}, {"f", "g", "h"}),
        (["assert [f(i) for i in range(3)] == sorted(y)"], {"setup": "y = 3"}, {"f"}),
        (["import math\nassert math.isclose(f(1), math.pi)"], {}, {"f"}),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [2]}, {}, {"f", "Solution"}),
        ([{"args": [1], "returns": 2}], {"entry": "Solution().f"}, {"Solution"}),
        ("def check(candidate):\n    assert candidate(1) == 2", {"entry": "f"}, {"f"}),
        ("from solution import f, g\nimport pytest\ndef test_f(tmp):\n    assert f(1) == g", {}, {"f", "g"}),
        ([{"stdin": "1", "stdout": "2"}], {}, set()),
    ],
)
def test_code_reward_extract_code_tests_say_which_names_they_use(
    tests: Any, settings: dict[str, Any], names: set[str]
) -> None:
    task = parse_task(tests, **settings)
    assert task.names == names
    assert task.reads_input is (not names)


@given(st.text(alphabet="`~ \n\t>-1.pydef(x):#=!\ufeff", max_size=200), st.booleans())
def test_code_reward_extract_code_that_is_found_is_never_blank_and_has_no_mark(text: str, named: bool) -> None:
    code = extract_code(text, "python", names={"f"} if named else ())
    assert code is None or (code.strip() and "\ufeff" not in code)


@given(st.text(alphabet="abc=()\n ", min_size=1, max_size=60), st.sampled_from(["", " ", "   ", "\t", "> ", "- "]))
def test_code_reward_extract_code_in_an_indented_fence_is_the_code(content: str, prefix: str) -> None:
    """Whatever stands before the fence, the program is that of a plain fence."""
    code = "x = 1\n" + content.rstrip() + "\n"
    first, rest = prefix, "  " if prefix == "- " else prefix
    lines = [first + "```python", *(rest + line for line in code.splitlines()), rest + "```"]
    found = extract_code("\n".join(lines), "python")
    assert found is not None and found.split("\n")[: len(code.splitlines())] == code.splitlines()


@pytest.mark.parametrize(
    "piece",
    ["```python\n", "~~~\n", "> ", " ", "```", "\t", "- ", "1. ", "1. ```\n", ">>> ", "\n", "`", "def f\n", "> ```\n"],
)
def test_code_reward_extract_code_is_found_in_linear_time(piece: str) -> None:
    def seconds(size: int) -> float:
        text = (piece * size)[:size] + ">" * 5000 + "```\n" + "> x\n" * 1000
        taken = []
        for _ in range(3):  # a collection of garbage takes longer than the text in a process of many tests
            started = time.process_time()
            extract_code(text, "python", names={"f"}, reads_input=True)
            taken.append(time.process_time() - started)
        return min(taken)

    assert seconds(200_000) < 20 * (seconds(20_000) + 0.02)
