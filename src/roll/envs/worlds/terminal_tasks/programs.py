"""Tasks about programs: fix a failing test, write one, install a tool and use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from roll.envs.worlds.terminal_tasks.task import Task, draw_words, expect_answer, expect_output

__all__ = ["PROGRAM_TASKS"]

_BUGS: tuple[tuple[str, str, str, str], ...] = (
    ("total(numbers)", "    return sum(numbers[1:])", "    return sum(numbers)", "total([4, {a}, {b}])"),
    ("largest(numbers)", "    return sorted(numbers)[0]", "    return sorted(numbers)[-1]", "largest([{a}, {b}, 3])"),
    ("mean(numbers)", "    return sum(numbers) // 2", "    return sum(numbers) / len(numbers)", "mean([{a}, {b}, 6])"),
    ("is_even(number)", "    return number % 2 == 1", "    return number % 2 == 0", "is_even({a})"),
    ("last(items)", "    return items[0]", "    return items[-1]", "last([1, {a}, {b}])"),
    ("area(width, height)", "    return width + height", "    return width * height", "area({a}, {b})"),
    ("shout(text)", "    return text.lower() + '!'", "    return text.upper() + '!'", "shout('a{a}b')"),
    ("squares(n)", "    return [i * i for i in range(n - 1)]", "    return [i * i for i in range(n)]", "squares({c})"),
)


def _evaluate(signature: str, body: str, call: str) -> object:
    """Define a function with this signature and body, and return the value of the expression `call`.

    Only code from this module is executed, never code from a model.
    """
    names: dict[str, object] = {}
    exec(f"def {signature}:\n{body}\nvalue = {call}", names)
    return names["value"]


def _format_call(call: str) -> str:
    return f"python3 -c 'import tools; print(tools.{call})'".replace("'a", '"a').replace("b')", 'b")')


def _make_fix_failing_test_task(random: Random) -> Task:
    signature, wrong, right, call = random.choice(_BUGS)
    tested, *hidden = (
        call.format(a=random.randint(10, 90), b=random.randint(10, 90), c=random.randint(3, 9)) for _ in range(4)
    )
    value = _evaluate(signature, right, tested)
    test = f"import tools\n\nassert tools.{tested} == {value!r}, tools.{tested}\nprint('passed')\n"
    files = {"tools.py": f"def {signature}:\n{wrong}\n", "test_tools.py": test}
    checks = [expect_output(_format_call(call), _evaluate(signature, right, call)) for call in hidden]
    text = "`python3 test_tools.py` fails. Fix tools.py so that its function does what its name says."
    solution = f"cat > tools.py <<'END'\ndef {signature}:\n{right}\nEND"
    return Task(text=text, files=files, checks=checks, solution=solution)


def _make_fix_syntax_task(random: Random) -> Task:
    word, factor = draw_words(random, 1)[0], random.randint(2, 9)
    lines = [
        "import sys",
        "",
        "def main():",
        "    for line in sys.stdin:",
        f"        print('{word}', int(line) * {factor})",
        "",
        "main()",
    ]
    fixed = "\n".join(lines) + "\n"
    broken = random.choice(
        [("def main():", "def main()"), ("int(line) * ", "int(line * "), ("in sys.stdin:", "in sys.stdin")]
    )
    files = {"program.py": fixed.replace(*broken)}
    a, b = random.randint(10, 99), random.randint(10, 99)
    checks = [expect_output("python3 program.py", f"{word} {a * factor}\n{word} {b * factor}", f"{a}\n{b}\n")]
    wanted = f"print '{word}' and {factor} times the number for every line that it reads"
    text = f"program.py has a syntax error. It should {wanted}. Fix it."
    return Task(text=text, files=files, checks=checks, solution=f"cat > program.py <<'END'\n{fixed}END")


def _make_fix_import_task(random: Random) -> Task:
    module, wrong, word = draw_words(random, 3)
    files = {
        f"library/{module}.py": f"def greet(name):\n    return 'hello {word} ' + name\n",
        "library/__init__.py": "",
        "main.py": f"import sys\nfrom library.{wrong} import greet\n\nprint(greet(sys.argv[1]))\n",
    }
    name = draw_words(random, 1)[0]
    text = "`python3 main.py NAME` fails since it imports a module that is not there. Fix main.py."
    solution = f"sed -i s/library.{wrong}/library.{module}/ main.py"
    return Task(
        text=text,
        files=files,
        checks=[expect_output(f"python3 main.py {name}", f"hello {word} {name}")],
        solution=solution,
    )


def _make_write_function_task(random: Random) -> Task:
    kind, body, example = random.choice(
        [
            ("the number of vowels (a, e, i, o, u) in a text", "return sum(c in 'aeiou' for c in x)", "'programming'"),
            (
                "a text's words in reverse order, with single spaces",
                "return ' '.join(x.split()[::-1])",
                "'one two three'",
            ),
            ("the sum of the digits of a whole number", "return sum(map(int, str(x)))", "4096"),
            ("whether a text reads the same backwards", "return x == x[::-1]", "'level'"),
            ("the factorial of a whole number", "import math; return math.factorial(x)", "7"),
        ]
    )
    shown = _evaluate("f(x)", f"    {body}", f"f({example})")
    text = f"Write a file solution.py with a function f(x) that returns {kind}: f({example}) is {shown!r}."
    letters = "".join(random.choices("abeio ", k=12)).strip() or "a"
    arguments = [example, repr(letters) if example.startswith("'") else str(random.randint(3, 12))]
    checks = []
    for argument in arguments:
        value = _evaluate("f(x)", f"    {body}", f"f({argument})")
        quoted = argument.replace("'", '"')
        checks.append(expect_output(f"python3 -c 'from solution import f; print(f({quoted}))'", value))
    solution = f"cat > solution.py <<'END'\ndef f(x):\n    {body}\nEND"
    return Task(text=text, files={}, checks=checks, solution=solution)


def _make_write_script_task(random: Random) -> Task:
    word, count = draw_words(random, 1)[0], random.randint(2, 6)
    wanted = f"prints a line '{word}', then its first argument {count} times, one a line"
    text = f"Write an executable bash script repeat.sh that {wanted}."
    script = f'#!/bin/bash\necho {word}\nfor i in $(seq {count}); do echo "$1"; done\n'
    checks = [expect_output(f"./repeat.sh {arg}", "\n".join([word] + [arg] * count)) for arg in draw_words(random, 2)]
    solution = f"cat > repeat.sh <<'END'\n{script}END\nchmod +x repeat.sh"
    return Task(text=text, files={}, checks=checks, solution=solution)


_CIPHER_SCRIPT = """#!/usr/bin/env python3
import sys

SHIFT = int(open(__file__.replace("bin/", "share/") + ".conf").read())
for line in sys.stdin:
    print("".join(chr((ord(c) - 97 + SHIFT) % 26 + 97) if c.islower() else c for c in line), end="")
"""
_INSTALL_SCRIPT = """#!/bin/bash
set -e
mkdir -p "$1/bin" "$1/share"
cp NAME.py "$1/bin/NAME"
cp NAME.conf "$1/share/NAME.conf"
chmod +x "$1/bin/NAME"
"""


def _make_install_tool_task(random: Random) -> Task:
    name, key = draw_words(random, 2)
    shift = random.randint(1, 25)
    readme = f"Run bash install.sh PREFIX here: {name} is then in PREFIX/bin. It reads text and writes it in code.\n"
    files = {
        f"{name}-1.0/{name}.py": _CIPHER_SCRIPT,
        f"{name}-1.0/{name}.conf": f"{shift}\n",
        f"{name}-1.0/install.sh": _INSTALL_SCRIPT.replace("NAME", name),
        f"{name}-1.0/README": readme,
        "plain.txt": f"{key} {name}\n",
    }

    def encipher(text: str) -> str:
        return "".join(chr((ord(c) - 97 + shift) % 26 + 97) if c.islower() else c for c in text)

    source = f"Install the tool whose source is in {name}-1.0 below ~/local (its README says how)"
    text = f"{source}, and use it to write plain.txt in code into answer.txt."
    solution = f"(cd {name}-1.0 && bash install.sh ~/local) && ~/local/bin/{name} < plain.txt > answer.txt"
    checks = [
        expect_answer(encipher(f"{key} {name}")),
        expect_output(f"echo abc | ~/local/bin/{name}", encipher("abc")),
    ]
    return Task(text=text, files=files, checks=checks, solution=solution)


def _make_fix_build_task(random: Random) -> Task:
    part, other, wrong = draw_words(random, 3)
    build = f"#!/bin/bash\nset -e\nmkdir -p out\ncat src/{wrong}.txt src/{other}.txt > out/all.txt\n"
    files = {f"src/{part}.txt": f"{part}\n", f"src/{other}.txt": f"{other}\n", "build.sh": build}
    wrongly = f"since it names a file that is not there: {part} is meant"
    text = f"`bash build.sh` fails, {wrongly}. Fix build.sh and run it, so that out/all.txt is made."
    checks = [expect_output("rm -rf out; bash build.sh; cat out/all.txt", f"{part}\n{other}")]
    return Task(text=text, files=files, checks=checks, solution=f"sed -i s/{wrong}/{part}/ build.sh; bash build.sh")


def _make_run_with_settings_task(random: Random) -> Task:
    variable, value, secret = draw_words(random, 3)
    code = sum(map(ord, secret)) * 7
    program = (
        f"import os, sys\nif os.environ.get('{variable.upper()}') != '{value}':\n"
        f"    sys.exit('set the variable {variable.upper()} to the word in the file word')\n"
        f"print(sum(map(ord, open('{secret}.dat').read())) * 7)\n"
    )
    files = {"program.py": program, "word": value + "\n", f"{secret}.dat": secret}
    text = "Run program.py with what it asks for, and write what it prints into answer.txt."
    solution = f"{variable.upper()}=$(cat word) python3 program.py > answer.txt"
    return Task(text=text, files=files, checks=[expect_answer(code)], solution=solution)


PROGRAM_TASKS: Mapping[str, Callable[[Random], Task]] = {
    "fix_failing_test": _make_fix_failing_test_task,
    "fix_syntax": _make_fix_syntax_task,
    "fix_import": _make_fix_import_task,
    "write_function": _make_write_function_task,
    "write_script": _make_write_script_task,
    "install_tool": _make_install_tool_task,
    "fix_build": _make_fix_build_task,
    "run_with_settings": _make_run_with_settings_task,
}
