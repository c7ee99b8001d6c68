"""Checks the words of names, docstrings, comments, messages and pages against `vocabulary.txt`, for `make lint`."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

RULES = Path(__file__).with_name("vocabulary.txt")
VERBS = Path(__file__).with_name("verbs.txt")
CODE = ("src", "packages/roll-sandbox/src")
PAGES = ("README.md", "CONTRIBUTING.md", "docs", "examples")
EXCEPTION = "vocabulary:"
"""Marks a line, in a comment or in `<!-- -->`, whose words are right; the reason follows."""
SHARE_WITHOUT_A_VERB = 0.01
"""Of the docstrings of functions, at most so many open with another word than a verb of `verbs.txt`."""

_PARTS_OF_NAMES = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_+")
_CODE_IN_PAGES = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def rules() -> tuple[dict[re.Pattern[str], str], set[str]]:
    """Return the advice for each pattern of `vocabulary.txt`, and the files that it excepts."""
    lines = (line for line in RULES.read_text().splitlines() if line.strip() and not line.startswith("#"))
    pairs = [re.split(r" {2,}", line, maxsplit=1) for line in lines]
    excepted = {pattern.removeprefix("except ") for pattern, _ in pairs if pattern.startswith("except ")}
    patterns = ((pattern, advice) for pattern, advice in pairs if not pattern.startswith("except "))
    return {re.compile(rf"\b({pattern})\b", re.IGNORECASE): advice for pattern, advice in patterns}, excepted


def words_of_code(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of every comment, string and name."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], _PARTS_OF_NAMES.sub(" ", token.string)
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            for number, line in enumerate(token.string.splitlines(), token.start[0]):
                yield number, line.replace("_", " ")


def words_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of every line that is not inside a block of code."""
    prose = _CODE_IN_PAGES.sub(lambda block: "\n" * block[0].count("\n"), text)
    yield from enumerate(prose.splitlines(), 1)


def hits(path: Path, advice: dict[re.Pattern[str], str]) -> Iterator[str]:
    """Yield one message for each word of the file at `path` that a rule forbids."""
    text = path.read_text()
    lines = text.splitlines()
    for number, words in words_of_code(text) if path.suffix == ".py" else words_of_page(text):
        if EXCEPTION in lines[number - 1]:
            continue
        for pattern, instead in advice.items():
            if found := pattern.search(words):
                yield f"{path}:{number}: {found[0]!r}: {instead}"


def without_verb(source: str, verbs: frozenset[str]) -> Iterator[tuple[int, str, bool]]:
    """Yield the line number, the name and whether no verb opens the docstring, of every function that has one."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not (docstring := ast.get_docstring(node)):
            continue
        if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue  # a property is a noun
        yield node.lineno, node.name, docstring.split()[0].strip(".,:;") not in verbs


def main() -> int:
    """Print every hit; the exit code says whether there was one, or too many docstrings open without a verb."""
    (advice, excepted), verbs = rules(), frozenset(VERBS.read_text().split())
    modules = [path for root in CODE for path in sorted(Path(root).rglob("*.py"))]
    pages = [path for root in map(Path, PAGES) for path in ([root] if root.is_file() else sorted(root.rglob("*.md")))]
    found = [hit for path in [*modules, *pages] if str(path) not in excepted for hit in hits(path, advice)]
    functions = [(path, *each) for path in modules for each in without_verb(path.read_text(), verbs)]
    verbless = [f"{path}:{line}: the docstring of {name} has no verb" for path, line, name, bad in functions if bad]
    if len(verbless) > SHARE_WITHOUT_A_VERB * len(functions):
        found += verbless
    without = f"{len(verbless)} of {len(functions)} docstrings of functions open without a verb"
    print("\n".join(found) or f"Vocabulary kept by {len(modules)} modules and {len(pages)} pages; {without}.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
