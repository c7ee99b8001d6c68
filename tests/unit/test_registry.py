"""Names that are offered for a misspelled one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.load import load_config
from roll.config.presets import PRESET_NAMES
from roll.errors import ConfigError
from roll.registry import count_edits, did_you_mean, find_similar_names


@pytest.mark.parametrize(
    ("text", "other", "edits"),
    [
        ("", "", 0),
        ("", "abc", 3),
        ("gpro", "grpo", 1),  # two neighbors swapped
        ("gpro", "gspo", 2),  # p for s, r for p
        ("kitten", "sitting", 3),
        ("ca", "abc", 3),  # a swapped pair is not edited again, so it is not the 2 of Damerau and Levenshtein
        ("abcd", "badc", 2),
    ],
)
def test_registry_edits_count_swapped_neighbors_once(text: str, other: str, edits: int) -> None:
    assert count_edits(text, other) == edits


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_registry_edits_are_a_symmetric_distance_within_its_bounds(text: str, other: str) -> None:
    edits = count_edits(text, other)
    assert edits == count_edits(other, text)
    assert (edits == 0) == (text == other)
    assert abs(len(text) - len(other)) <= edits <= max(len(text), len(other))


@pytest.mark.parametrize("name", [name for name in PRESET_NAMES if len(name) >= 3])
def test_registry_nearest_of_a_preset_with_two_letters_swapped_is_one_edit_away(name: str) -> None:
    for i in range(len(name) - 1):
        typo = name[:i] + name[i + 1] + name[i] + name[i + 2 :]
        one_edit = [f" Did you mean '{known}'?" for known in PRESET_NAMES if count_edits(typo, known) == 1]
        if typo not in PRESET_NAMES:
            assert did_you_mean(typo, list(PRESET_NAMES)) in one_edit, typo


def test_registry_nearest_names_do_not_depend_on_the_order_of_the_known_ones() -> None:
    assert find_similar_names("gpro", ["gspo", "grpo"]) == find_similar_names("gpro", ["grpo", "gspo"]) == ["grpo"]
    assert find_similar_names("gpro", ["gspo", "sapo", "grpo"], limit=2) == ["grpo", "gspo"]
    assert find_similar_names("unlike", ["grpo"]) == []


def test_registry_nearest_algorithm_of_a_configuration_has_the_swapped_letters_in_order() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'grpo'"):
        load_config({"algorithm": {"type": "gpro"}})
