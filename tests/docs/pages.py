"""The documentation as its blocks."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "skills").rglob("SKILL.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
_FENCE = re.compile(
    r"^(?P<indent>[ ]*)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.DOTALL | re.MULTILINE
)
_INLINE = re.compile(r"(?<!`)`(roll [^`\n]+)`(?!`)")
_PROGRAM = re.compile(r"^(?:\$ |! ?)?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(roll|make|pytest|python|pip|uv)\s")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    title: str = ""
    """Of a block that is a file."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """Its commands of this project, each as its words; of a block that shows output, too."""
        if self.language not in ("", "sh", "bash", "console"):
            return []
        joined = self.text.replace("\\\n", " ")
        found = [line.strip().removeprefix("$ ") for line in joined.splitlines() if _PROGRAM.match(line.strip())]
        return [words for line in found for words in split(line)]


def split(line: str) -> list[list[str]]:
    """A line of shell as commands: comments, pipes and redirections left out."""
    words = shlex.split(line, comments=True)
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", ";", "|"):
            parts.append([])
        elif word in (">", "2>"):
            break
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


def blocks(*languages: str) -> list[Block]:
    """Every block of the documentation in one of these languages; all without any."""
    return [block for page in PAGES for block in _of(page) if not languages or block.language in languages]


def _of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        indent = found["indent"]
        body = "".join(line.removeprefix(indent) for line in found["text"].splitlines(keepends=True))
        yield Block(
            page=str(page.relative_to(ROOT)),
            line=text[: found.start()].count("\n") + 1,
            language=found["language"].partition(" title=")[0].strip(),
            title=found["language"].partition(" title=")[2].strip().strip('"'),
            text=body,
        )


def inline_commands() -> list[tuple[str, list[str]]]:
    """`roll …` in running text, with the page."""
    return [
        (str(page.relative_to(ROOT)), words)
        for page in PAGES
        if page.name != "migration.md"
        for text in _INLINE.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
        for words in split(text)[:1]
    ]
