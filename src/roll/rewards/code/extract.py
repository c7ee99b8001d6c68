"""Extract the program from an answer's text. The text is only searched, not parsed or executed.

1. Of the fenced blocks with the language's tag, the last one that defines a name that the tests use (for tests of input
   and output, the last one that reads its input); if there is none, the same among blocks without a tag; else the last
   tagged block, or the last one without a tag (a fence that is never closed ends with the text).
2. Blocks of other languages only: no program.
3. No fence at all (Python): from the first line that starts like a program, up to the first line of prose after it;
   the whole text if no line does, or in other languages.

A block of an interactive session (`>>> f(1)`) is an example; it is used only if there is no other block, and then
without its prompts.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection
from dataclasses import dataclass

__all__ = ["extract_code"]

_LANGUAGE_TAGS = {
    "python": {"python", "py", "ipython", "python3", "py3", "python2", "python-3", "solution.py", "main.py", "pycon"},
    "bash": {"bash", "sh", "shell", "zsh"},
    "javascript": {"javascript", "js", "node", "mjs"},
    "cpp": {"cpp", "c++", "cc", "cxx", "c++11", "c++14", "c++17", "c++20"},
}
_GENERIC_TAGS = {"", "code", "program", "solution", "tool_code"}
_FENCE_PATTERN = re.compile(
    r"^(?P<indent>[ \t]*+(?:>[ \t]?+){0,8}+(?:(?:[-*+]|\d{1,3}[.)])[ \t]++)?+)(?P<mark>`{3,}+|~{3,}+)[ \t]*+"
    r"(?P<tag>[\w+#.-]*+)[^\n`]*+$",
    re.MULTILINE,
)
"""Possessive throughout, so an answer of spaces or tildes alone is read in linear time."""
_QUOTE_PREFIX_PATTERN = re.compile(r"[ \t]*+(?:>[ \t]?)?+")
_VERSION_PATTERN = re.compile(r"(?<=python)[ \d.]+$|(?<=py)[\d.]+$")
_SESSION_PATTERN = re.compile(r"[ \t]*>>>(?: |$)")
_INPUT_READ_PATTERN = re.compile(r"\binput\s{0,3}\(|\bstdin\b|\bopen\s{0,3}\(\s{0,3}0\b|/dev/stdin|\bfileinput\b")
_CODE_START_PATTERN = re.compile(r"(?:async\s+def|def|class)\s+\w|import\s+\w|from\s+[\w.]+\s+import\b|@\w")
_CONTINUATION_PATTERN = re.compile(
    r"""(?:async|def|class|import|from|if|elif|else|for|while|with|try|except|finally|return|raise|assert|pass|del
        |global|lambda|match|case)\b(?!\s*,)(?:.*[:(=\[\]).\w])?\s*(?:\#.*)?$
    |[A-Za-z_][\w.]*\s*(?:[-+*/%&|^@]|//|\*\*|>>|<<)?=[^=]
    |[A-Za-z_][\w.]*\s*[(\[]
    |[A-Za-z_]\w*\s*:\s*[\w\[]+
    |[@\#)\]}"']""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class _Block:
    tag: str
    content: str

    @property
    def is_session(self) -> bool:
        """True if the block shows an interactive session."""
        return _SESSION_PATTERN.match(self.content.lstrip("\n")) is not None


def extract_code(text: str, language: str, *, names: Collection[str] = (), reads_input: bool = False) -> str | None:
    """Return the program, without fences and byte order marks; `None` if the answer has no program.

    Args:
        text: The model's answer.
        language: `python`, `bash`, `javascript`, or `cpp`.
        names: Names in the program that the tests use (Python); a block that defines one of them is preferred.
        reads_input: Whether the program receives input; a block that reads input is preferred (Python).
    """
    # Python refuses a byte order mark inside of source text.
    text = text.replace("\ufeff", "")
    blocks = _find_blocks(text)
    if not blocks:
        code = _extract_bare_python(text) if language == "python" else text
        return code if code.strip() else None
    tagged = [block for block in blocks if block.tag in _LANGUAGE_TAGS[language]]
    untagged = [block for block in blocks if block.tag in _GENERIC_TAGS]
    found = _choose_block([tagged, untagged], _make_preference(names, reads_input) if language == "python" else None)
    return found if found and found.strip() else None


def _make_preference(names: Collection[str], reads_input: bool) -> Callable[[str], bool] | None:
    """Return a predicate that tells whether code is the program itself rather than an example of its use.

    The code must define one of `names` or, if there are none and `reads_input` is true, read input. Return `None` if
    neither is known.
    """
    if names:
        either = "|".join(map(re.escape, sorted(names)))
        defines = re.compile(
            rf"^[ \t]*+(?:async[ \t]+)?(?:def|class)[ \t]+(?:{either})\b|^(?:{either})[ \t]*+(?::[^=\n]*+)?=(?!=)",
            re.MULTILINE,
        )
        return lambda code: defines.search(code) is not None
    return (lambda code: _INPUT_READ_PATTERN.search(code) is not None) if reads_input else None


def _choose_block(blocks_by_priority: list[list[_Block]], is_preferred: Callable[[str], bool] | None) -> str | None:
    """Return the code of the best block; `None` if there is no block.

    The lists in `blocks_by_priority` are searched in order for a preferred block, each from its end; if no block is
    preferred, the last block of the first non-empty list is used. Interactive sessions are used only if there is no
    other block.
    """
    programs = [[block.content for block in blocks if not block.is_session] for blocks in blocks_by_priority]
    if is_preferred is not None:
        for contents in programs:
            for content in reversed(contents):
                if is_preferred(content):
                    return content
    sessions = [_remove_prompts(block.content) for blocks in blocks_by_priority for block in blocks if block.is_session]
    return next((contents[-1] for contents in [*programs, sessions] if contents), None)


def _remove_prompts(content: str) -> str:
    """Remove the prompts and the output from an interactive session, so that only the typed text is left."""
    lines = [line.lstrip() for line in content.splitlines()]
    return "".join(f"{line[4:]}\n" for line in lines if line[:4].rstrip() in (">>>", "..."))


def _find_blocks(text: str) -> list[_Block]:
    """Return every fenced block."""
    blocks: list[_Block] = []
    fences = list(_FENCE_PATTERN.finditer(text))
    position = 0
    while position < len(fences):
        begin = fences[position]
        mark = begin["mark"]
        position += 1
        end = None
        while position < len(fences) and end is None:
            fence = fences[position]
            position += 1
            # CommonMark: a closing fence has the same character, is at least as long, and has no info string.
            if fence["mark"][0] == mark[0] and len(fence["mark"]) >= len(mark) and not fence["tag"]:
                end = fence.start()
        content = text[begin.end() + 1 : len(text) if end is None else end]
        if end is None:
            content = _cut_at_glued_fence(content, mark)
        tag = _VERSION_PATTERN.sub("", begin["tag"].lower())
        blocks.append(_Block(tag, _remove_indent(content, begin["indent"])))
    return blocks


def _cut_at_glued_fence(content: str, mark: str) -> str:
    """Return the code up to a closing fence `mark` at the end of a line of code; without a fence, return all code."""
    end = re.search(rf"{re.escape(mark)}[ \t]*$", content, re.MULTILINE)
    return content if end is None else content[: end.start()] + "\n"


def _remove_indent(content: str, indent: str) -> str:
    """Return a block's content without the indentation, list marker or quotation marks of its fence."""
    if ">" in indent:
        depth = indent.count(">")
        lines = content.splitlines(keepends=True)
        for _ in range(depth):
            lines = [
                _QUOTE_PREFIX_PATTERN.sub("", line, count=1) if line.lstrip().startswith(">") else line
                for line in lines
            ]
        content = "".join(lines)
    width = len(indent.expandtabs(4))
    first = next((line for line in content.splitlines() if line.strip()), "")
    if ">" not in indent and width <= len(first.expandtabs(4)) - len(first.expandtabs(4).lstrip()):
        content = "".join(_remove_columns(line, width) for line in content.splitlines(keepends=True))
    return textwrap.dedent(content) if content.lstrip("\n")[:1] in (" ", "\t") else content


def _remove_columns(line: str, width: int) -> str:
    """Remove up to `width` columns of leading whitespace from a line."""
    column = 0
    for position, character in enumerate(line):
        if column >= width or character not in " \t":
            return line[position:]
        # CommonMark: tab stops are 4 columns wide.
        column += 1 if character == " " else 4 - column % 4
    return line[-1:] if line.endswith("\n") else ""


def _extract_bare_python(text: str) -> str:
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if _CODE_START_PATTERN.match(line)), None)
    if first is None:
        return _remove_prompts(text) if _SESSION_PATTERN.match(text.lstrip()) else text
    kept: list[str] = []
    for line in lines[first:]:
        if line[:1].strip() and not _CONTINUATION_PATTERN.match(line):
            break
        kept.append(line)
    return "\n".join(kept) + "\n"
