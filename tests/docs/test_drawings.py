"""The drawings are current, readable to everybody, and each is on a page."""

from xml.etree import ElementTree

import diagrams
import pytest
from docs.pages import PAGES

MADE = {path.stem: text for path, text in diagrams.drawings().items()}
SVG = "{http://www.w3.org/2000/svg}"


def test_docs_drawings_all_six_are_as_the_tool_draws_them():
    assert {path.stem: path.read_text(encoding="utf-8") for path in diagrams.OUT.glob("*.svg")} == MADE, (
        "run: python tools/diagrams.py"
    )
    assert len(MADE) == 6


@pytest.mark.parametrize("name", MADE)
def test_docs_drawings_a_drawing_says_what_it_shows_and_its_text_is_text(name):
    root = ElementTree.fromstring(MADE[name])
    title, text = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert root.get("role") == "img" and root.get("aria-labelledby") == f"{title.get('id')} {text.get('id')}"
    assert len(title.text) > 10 and len(text.text) > 100
    assert len(list(root.iter(f"{SVG}text"))) > 10
    assert "<script" not in MADE[name] and "href" not in MADE[name]


@pytest.mark.parametrize("name", MADE)
def test_docs_drawings_a_drawing_stays_within_its_frame(name):
    root = ElementTree.fromstring(MADE[name])
    width, height = (float(part) for part in root.get("viewBox").split()[2:])
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(key)) for key in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
    for text in root.iter(f"{SVG}text"):
        length = len(text.text) * (5.7 if text.get("class") == "small" else diagrams.LETTER)
        reach = {"start": (0, length), "middle": (length / 2, length / 2), "end": (length, 0)}[text.get("text-anchor")]
        assert float(text.get("x")) - reach[0] >= 0 and float(text.get("x")) + reach[1] <= width, text.text
        assert 0 < float(text.get("y")) < height


@pytest.mark.parametrize("name", MADE)
def test_docs_drawings_a_drawing_is_on_one_page(name):
    line = f'--8<-- "docs/diagrams/{name}.svg"'
    assert sum(page.read_text().count(line) for page in PAGES) == 1


def test_docs_drawings_what_does_not_fit_a_box_is_refused():
    drawing = diagrams.Drawing("x", 10, "x", "x")
    with pytest.raises(ValueError, match="too long for 20"):
        drawing.box(0, 0, 20, 10, ["much too long for that"])
