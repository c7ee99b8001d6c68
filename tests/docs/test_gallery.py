"""The gallery is what its results say."""

import json
from xml.etree import ElementTree

import gallery_page
import pytest
import yaml
from docs.pages import ROOT

RECORDS = {path.stem: json.loads(path.read_text()) for path in gallery_page.RESULTS.glob("*.json")}


def test_docs_gallery_pages_are_current():
    made = gallery_page.pages()
    there = {path: path.read_bytes() for path in gallery_page.DOCS.iterdir()}
    assert there == made, "run: python tools/gallery_page.py"


def test_docs_gallery_every_page_is_reached_from_the_navigation():
    """The navigation has an entry for each index page, and the index page links to the other pages of its folder."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    for folder in ("gallery", "benchmarks", "decisions"):
        index = ROOT / "docs" / folder / "index.md"
        assert f"{folder}/index.md" in navigation
        pages = {path.name for path in index.parent.glob("*.md")} - {"index.md"}
        assert {name for name in pages if f"({name})" not in index.read_text()} == set()
    assert all((ROOT / "docs/gallery" / f"{name}.md").is_file() for name in RECORDS)


@pytest.mark.parametrize("name", RECORDS)
def test_docs_gallery_results_are_of_the_example_as_it_is(name):
    figures = RECORDS[name]["figures"]
    example = yaml.safe_load((ROOT / figures["example"]).read_text())
    assert example["pipeline"] == figures["pipeline"]
    assert example["training"].get("num_steps", figures["num_steps"]) == figures["num_steps"]
    assert {"cpu", "num_cores", "memory_bytes"} <= RECORDS[name]["machine"].keys()


def test_docs_gallery_curves_are_drawn_where_the_figures_are():
    figures = {
        "measure": "eval/accuracy",
        "learnt": "reward/mean",
        "curves": {"held-out": [[0, 0.0], [10, 1.0]], "training": [[1, 0.0], [10, 0.5]]},
    }
    root = ElementTree.fromstring(gallery_page.curves(figures))
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter("{http://www.w3.org/2000/svg}circle")]
    # steps 0 to 10 lie on 46 … 624, rewards 0 to 1 on 192 … 34
    assert dots[:2] == [(46.0, 192.0), (624.0, 34.0)]


def test_docs_gallery_what_a_model_wrote_cannot_leave_its_block():
    sample = {"prompt": "a|b <i>", "right": "1"}
    answer = {"text": "```\n# not a heading", "cut": False, "reward": 0.0}
    lines = gallery_page._sample("x", sample | {"before": answer, "after": answer | {"cut": True, "reward": None}})
    assert lines[0] == "**a\\|b \\<i\\>** (reference: 1)"
    assert lines.count("````text") == 2 and lines.count("````") == 2
    assert "After training (reward: none):" in lines


def test_docs_gallery_images_of_prompts_are_files_next_to_the_page():
    answer = {"text": "red", "cut": False, "reward": 1.0}
    url = "data:image/png;base64,iVBORw0KGgo="  # the first 8 bytes of every PNG
    sample = {"prompt": "Color?", "right": "red", "images": [url], "before": answer, "after": answer}
    files = gallery_page._images("colors", sample)
    # sha256 of these 8 bytes begins with 4c4b6a3be131
    assert files == {"colors-4c4b6a3be131.png": b"\x89PNG\r\n\x1a\n"}
    assert gallery_page._sample("colors", sample)[2] == "![image of the prompt](colors-4c4b6a3be131.png)"
