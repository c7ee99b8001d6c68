"""What users name as they like stays in its place on the card."""

from __future__ import annotations

from roll.pipelines.model_card import _settings, _shown


def test_odd_names_break_no_table() -> None:
    rewards = [{"type": "python", "name": "half|full\n"}, {"type": "math"}]
    rows = list(_settings({"data": [{"domain": "a|b`\n## owned", "reward": rewards}]}))
    assert r"| data `a\|b' ## owned` | rewards: half\|full, math |" in rows
    assert not any("\n" in row for row in rows)
    assert _shown("odd`\nname") == "`odd' name`"
