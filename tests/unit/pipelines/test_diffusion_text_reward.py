"""The example of an OCR reward; texts are read from images where `rapidocr` is installed (`make test-extras`)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image, ImageDraw, ImageFont
from worlds.modules import load_module

EXAMPLE = Path(__file__).parents[3] / "examples" / "diffusion" / "text_reward.py"


@pytest.fixture(scope="module")
def reward() -> ModuleType:
    return load_module(EXAMPLE)


def draw_sign(text: str) -> Image.Image:
    image = Image.new("RGB", (320, 96), "white")
    ImageDraw.Draw(image).text((16, 24), text, fill="black", font=ImageFont.load_default(40))
    return image


@pytest.mark.parametrize(
    ("read", "wanted", "value"),
    [
        ("MAIN ST", "main st", 1.0),
        ("to MAINST 5", "MAIN ST", 1.0),
        ("MAIM ST", "MAIN ST", 1 - 1 / 6),
        ("", "OPEN", 0.0),
        ("nothing like it at all", "OPEN", 0.0),
    ],
)
def test_text_reward_is_1_minus_the_edit_distance_per_character(
    read: str, wanted: str, value: float, reward: ModuleType
) -> None:
    assert reward.compare_texts(read, wanted) == pytest.approx(value)


def test_text_reward_rows_without_a_text_are_an_error(reward: ModuleType) -> None:
    with pytest.raises(ValueError, match='no column "text"'):
        reward.reads_text(draw_sign("OPEN"), "a sign", {})


def test_text_reward_reads_the_text_of_the_column_or_in_quotation_marks(reward: ModuleType) -> None:
    pytest.importorskip("rapidocr")
    sign = draw_sign("MAIN STREET")
    assert reward.reads_text(sign, "a sign", {"text": "Main Street"}) == 1.0
    assert reward.reads_text(sign, 'a sign that says "MAIN STREET"', {}) == 1.0
    assert reward.reads_text(sign, "a sign", {"text": "MAIN STRAIT"}) == pytest.approx(0.8)
    assert reward.reads_text(sign, "a sign", {"text": "CLOSED"}) < 0.5
    assert reward.reads_text(Image.new("RGB", (320, 96), "white"), "a sign", {"text": "OPEN"}) == 0.0
