"""The program in an answer's text. Looks at the text alone: nothing of it is parsed or run here.

1. the last fenced block whose tag is the language, or else the last one without a tag (a fence that is never
   closed ends with the text);
2. no such block, but others: none;
3. no fence at all (Python): from the first line that begins like a program, up to the first line of prose after it;
   the whole text where no line does, or in other languages.
"""

from __future__ import annotations

import re

__all__ = ["extract_code"]

_TAGS = {
    "python": {"python", "py", "python3", "py3", "python2", "ipython"},
    "bash": {"bash", "sh", "shell", "zsh"},
    "javascript": {"javascript", "js", "node", "mjs"},
    "cpp": {"cpp", "c++", "cc", "cxx"},
}
_FENCE = re.compile(r"^[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([\w+#.-]*+)[^\n`]*+$", re.MULTILINE)
"""Possessive throughout: an answer of spaces or tildes alone is read in linear time."""
_BEGIN = re.compile(r"(?:async\s+def|def|class)\s+\w|import\s+\w|from\s+[\w.]+\s+import\b|@\w")
_GOES_ON = re.compile(
    r"""(?:async|def|class|import|from|if|elif|else|for|while|with|try|except|finally|return|raise|assert|pass|del
        |global|lambda|match|case)\b(?!\s*,)(?:.*[:(=\[\]).\w])?\s*(?:\#.*)?$
    |[A-Za-z_][\w.]*\s*(?:[-+*/%&|^@]|//|\*\*|>>|<<)?=[^=]
    |[A-Za-z_][\w.]*\s*[(\[]
    |[A-Za-z_]\w*\s*:\s*[\w\[]+
    |[@\#)\]}"']""",
    re.VERBOSE,
)


def extract_code(text: str, language: str) -> str | None:
    """The program, without fences; `None` where the answer has none.

    Args:
        text: the model's answer.
        language: `python`, `bash`, `javascript`, or `cpp`.
    """
    blocks = _blocks(text)
    if not blocks:
        code = _bare_python(text) if language == "python" else text
        return code if code.strip() else None
    for wanted in (_TAGS[language], {""}):
        found = [content for tag, content in blocks if tag in wanted]
        if found:
            return found[-1] if found[-1].strip() else None
    return None


def _blocks(text: str) -> list[tuple[str, str]]:
    """Tag and content of every fenced block."""
    found: list[tuple[str, str]] = []
    fences = list(_FENCE.finditer(text))
    position = 0
    while position < len(fences):
        begin = fences[position]
        mark = begin.group(1)
        position += 1
        end = len(text)
        while position < len(fences):
            fence = fences[position]
            position += 1
            if fence.group(1)[0] == mark[0] and len(fence.group(1)) >= len(mark) and not fence.group(2):
                end = fence.start()
                break
        found.append((begin.group(2).lower(), text[begin.end() + 1 : end]))
    return found


def _bare_python(text: str) -> str:
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if _BEGIN.match(line)), None)
    if first is None:
        return text
    kept: list[str] = []
    for line in lines[first:]:
        if line[:1].strip() and not _GOES_ON.match(line):
            break
        kept.append(line)
    return "\n".join(kept) + "\n"
