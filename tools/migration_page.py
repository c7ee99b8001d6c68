"""`docs/migration.md`, written from the rules that convert:  python tools/migration_page.py docs/migration.md"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from roll.cli.migration.rules import Rule
from roll.cli.migration.trl import TRAINERS, TRL_VERSION
from roll.cli.migration.trl_common import COMMON
from roll.cli.migration.trl_older import OLDER, RENAMED
from roll.cli.migration.verl import VERL_COMMIT
from roll.cli.migration.verl_rules import VERL

__all__ = ["page"]

_HEAD = f"""\
# Coming from TRL or verl

*Written from the rules in `src/roll/cli/migration/`, which also convert: change them there.*

```
roll config from-trl grpo.yaml -o run.yaml             # what `trl grpo --config grpo.yaml` would run
roll config from-trl grpo.yaml --processes 8           # … on 8 processes: TRL's batch grows with them
roll config from-trl train_grpo.py --rows 7473         # a script that calls GRPOTrainer; it is read, never run
roll config from-verl run_grpo.sh --rows 7473          # a script with overrides of verl.trainer.main_ppo, or a .yaml
roll check run.yaml
```

The configuration is printed, or written to `-o`. On standard error every key of the file is listed: what it became,
whether ROLL's default is the same anyway, whether it needs no counterpart, or that it could not be converted, and why.
What could not be is also in comments at the head of the new file. Defaults of the other library that differ from ROLL's
are written out, so that the run means the same: the loss and its clip, KL, groups and batches, learning rate, schedule.

Of a Python script the arguments of `GRPOConfig`, `SFTConfig`, `DPOConfig` or `RewardConfig` and of the trainer are
read, with `load_dataset`, `from_pretrained` and `LoraConfig` behind them: constants, names that are assigned one
constant, lists and dictionaries of these, and simple arithmetic. Whatever else the script says (`os.environ`, an
argument of the command line, a name that is assigned twice) is listed with its line as not converted, and TRL's default
stands in its place; `--set learning_rate=1e-6` says it. A file with several mistakes lists them all at once.

Three things are not a matter of keys:

- **Steps.** TRL's and verl's epochs count rows; a step of ROLL is one generation with all updates made from it.
  `--rows` says how many rows the data set has, where a file counts epochs.
- **Rewards of your own.** ROLL asks for one answer at a time, `def reward(text, answer, metadata) -> float`, in
  processes of their own: see [Rewards](rewards.md). Functions for verl,
  `(data_source, solution_str, ground_truth, extra_info)`, are bound by name and work as they are. TRL's get all
  completions: the new file names your function; rewrite it.
- **References in verl's rows** lie in `reward_model.ground_truth`. ROLL reads a column:

```python
import pyarrow.parquet as parquet

table = parquet.read_table("data/gsm8k/train.parquet")
answers = [row["ground_truth"] for row in table["reward_model"].to_pylist()]
parquet.write_table(table.append_column("answer", [answers]), "data/gsm8k/train-roll.parquet")
```

Keys are those of TRL {TRL_VERSION} and of verl at {VERL_COMMIT}; what another version calls
otherwise is reported as unknown.
"""
_TITLES = {"grpo": "TRL: GRPO", "sft": "TRL: supervised fine-tuning", "dpo": "TRL: DPO", "reward": "TRL: reward models"}


def _section(title: str, rules: Sequence[Rule]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| key | its default | in ROLL | |", "|---|---|---|---|")
    for rule in rules:
        if rule.kind in ("moved", "with"):
            where = ", ".join(f"`{key}`" for key in rule.to) or "the same"
            yield _row(rule, where, rule.note)
    for kind, words in (("lacking", "no counterpart"), ("needless", "needs none")):
        for rule in rules:
            if rule.kind == kind:
                yield _row(rule, words, rule.note)


def _row(rule: Rule, where: str, note: str) -> str:
    default = "" if rule.key.endswith(".*") else f"`{json.dumps(rule.default)}`"
    return f"| `{rule.key}` | {default} | {where} | {note} |"


def page() -> str:
    """The whole page."""
    common = {rule.key for rule in COMMON}
    lines: list[str] = [_HEAD.rstrip()]
    for trainer, rules in TRAINERS.items():
        lines += _section(_TITLES[trainer], [rule for rule in rules if rule.key not in common])
    lines += _section("TRL: every trainer", COMMON)
    lines += _section("TRL: keys of older versions", OLDER)
    lines += ["", "Renamed since: " + ", ".join(f"`{old}` is `{new}`" for old, new in RENAMED.items()) + "."]
    lines += _section("verl", VERL)
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
