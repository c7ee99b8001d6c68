"""The page about algorithms is what the presets say."""

from __future__ import annotations

from pathlib import Path

from algorithms_page import page

from roll.config.explain import explain
from roll.config.presets import PRESET_NAMES

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


def test_config_presets_page_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python tools/algorithms_page.py docs/algorithms.md"


def test_config_presets_page_explaining_the_algorithm_shows_what_every_preset_sets() -> None:
    text = explain("algorithm")
    assert all(name in text for name in PRESET_NAMES)
    assert "ratio.level=sequence, gate.type=min_clip, gate.low=0.0003" in text
