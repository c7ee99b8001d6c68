"""docs/migration.md is what the rules say."""

from pathlib import Path

import migration_page

from roll.cli.migration.trl import TRAINERS
from roll.cli.migration.verl_rules import VERL_RULES


def test_migration_page_the_page_is_up_to_date():
    written = Path("docs/migration.md").read_text()
    assert written == migration_page.page(), "run `python tools/migration_page.py docs/migration.md`"


def test_migration_page_the_page_has_every_key():
    written = Path("docs/migration.md").read_text()
    rules = [*VERL_RULES, *(rule for rules in TRAINERS.values() for rule in rules)]
    assert [rule.key for rule in rules if f"| `{rule.key}` |" not in written] == []
