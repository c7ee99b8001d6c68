"""Generate the reference of all keys in a page:  python tools/configuration_page.py docs/configuration.md [PIPELINE]"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from roll.config.base import Section
from roll.config.explain import format_default, get_summary, merge_keys
from roll.config.keys import Key, get_tag_key, iterate_keys
from roll.config.pipelines import DEFAULT_PIPELINE, PIPELINES

__all__ = ["BEGIN", "END", "reference", "renew"]

BEGIN = "<!-- reference: written by `python tools/configuration_page.py docs/configuration.md` -->"
END = "<!-- end of the reference -->"


def reference(pipeline: str = DEFAULT_PIPELINE) -> str:
    """Return one Markdown table per section, in the order of declaration; all members of a union share one table."""
    model = PIPELINES.get(pipeline)
    groups: dict[tuple[str, ...], list[Key]] = {}
    for key in iterate_keys(model):
        groups.setdefault(key.path[:-1], []).append(key)
    return "\n".join(line for parent, keys in groups.items() for line in _section(parent, keys, model))


def _section(parent: tuple[str, ...], keys: list[Key], model: type[Section]) -> Iterator[str]:
    yield from (f"### `{'.'.join(parent)}`" if parent else "### Top level", "")
    owners = {key.owner: key.variants for key in keys}
    if len(owners) == 1:
        yield from (get_summary(next(iter(owners))), "")
    else:
        choices = {variants[0]: section for section, variants in owners.items()}
        chooser = get_tag_key(next(iter(owners)))
        yield from (f"The key `{chooser}` selects the variant of an entry, which determines its other keys:", "")
        yield from (f"- `{chooser}: {tag}`: {get_summary(section)}" for tag, section in choices.items())
        yield ""
    column = len(owners) > 1
    head = ("key", *(("variants",) if column else ()), "type", "default", "description")
    yield from (_row(head), _row(["---"] * len(head)))
    for key in merge_keys(keys):
        of = "all" if len(key.variants) == len(owners) else ", ".join(key.variants)
        unit = f" Unit: {key.unit}." if key.unit else ""
        yield _row(
            [
                f"`{key.path[-1]}`",
                *([of] if column else []),
                key.type_description,
                format_default(key) if key.required or key.members else f"`{format_default(key)}`",
                key.meaning + unit,
            ]
        )
    yield ""


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def renew(page: Path, pipeline: str = DEFAULT_PIPELINE) -> None:
    """Write a pipeline's reference between the two marks in `page`."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{reference(pipeline)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    renew(Path(sys.argv[1]), *sys.argv[2:])
