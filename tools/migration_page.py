"""Generate `docs/migration.md` from the conversion rules:  python tools/migration_page.py docs/migration.md"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from roll.cli.migration.rules import Rule
from roll.cli.migration.trl import TRAINERS, TRL_VERSION
from roll.cli.migration.trl_common import COMMON_RULES
from roll.cli.migration.trl_older import OLDER_KEY_RULES, RENAMED_KEYS
from roll.cli.migration.verl import VERL_COMMIT
from roll.cli.migration.verl_rules import VERL

__all__ = ["page"]

_HEAD = f"""\
# Migrate from TRL or verl

*Generated from the conversion rules in `src/roll/cli/migration/`: change them there.*

```
roll config from-trl grpo.yaml -o run.yaml             # a configuration of `trl grpo`
roll config from-trl grpo.yaml --processes 8           # the run used 8 processes, which multiply TRL's batch
roll config from-trl train_grpo.py --rows 7473         # a script that calls GRPOTrainer; it is parsed, never run
roll config from-verl run_grpo.sh --rows 7473          # a script with overrides of verl.trainer.main_ppo, or a .yaml
roll check run.yaml
```

The command prints the configuration, or writes it to `-o`. On standard error, it reports for every key of the file
the new key, that ROLL's default has the same value, that the key is not needed, or why it could not be converted.
Comments at the top of the new file also list the keys that were not converted. Where the defaults of the other library
differ from ROLL's (loss, clip, KL, group and batch sizes, learning rate, schedule), they are written to the file, so
that the run has the same settings.

From a Python script, the command reads the arguments of `GRPOConfig`, `SFTConfig`, `DPOConfig` or `RewardConfig` and
of the trainer, with `load_dataset`, `from_pretrained` and `LoraConfig`. It evaluates constants, names that are
assigned one constant, lists and dictionaries of these, and simple arithmetic. Other expressions (`os.environ`, a
command-line argument, a name that is assigned twice) are listed with their line as not converted, and TRL's default
is used instead; set the value with `--set learning_rate=1e-6`. All errors of a file are listed at once.

Three things cannot be converted from key to key:

- **Steps.** An epoch of TRL or verl is a pass over the rows; a step of ROLL is one generation with all its updates. If
  a file sets a number of epochs, pass the number of rows of the dataset with `--rows`.
- **Your own rewards.** ROLL calls a reward with one answer, `def reward(text, answer, metadata) -> float`, in worker
  processes: see [Rewards](rewards.md). Functions for verl, `(data_source, solution_str, ground_truth, extra_info)`,
  work unchanged, because ROLL passes the arguments by name. TRL's functions receive all completions at once: the
  new file names your function, but you must rewrite it.
- **Reference answers.** In verl's rows, they are in `reward_model.ground_truth`, but ROLL reads a column. To add it:

```python
import pyarrow.parquet as parquet

table = parquet.read_table("data/gsm8k/train.parquet")
answers = [row["ground_truth"] for row in table["reward_model"].to_pylist()]
parquet.write_table(table.append_column("answer", [answers]), "data/gsm8k/train-roll.parquet")
```

The tables below list the keys of TRL {TRL_VERSION} and of verl at {VERL_COMMIT}; keys of other
versions are reported as unknown. The note `with KEY` means that the key is converted together with KEY, and `x` is a
multiplication.
"""
_TITLES = {"grpo": "TRL: GRPO", "sft": "TRL: supervised fine-tuning", "dpo": "TRL: DPO", "reward": "TRL: reward models"}


def _section(title: str, rules: Sequence[Rule]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| key | default | key in ROLL | note |", "|---|---|---|---|")
    for rule in rules:
        if rule.kind in ("renamed", "companion"):
            where = ", ".join(f"`{key}`" for key in rule.targets) or "no key: ROLL does the same"
            yield _row(rule, where, rule.note)
    for kind, words in (("unsupported", "no counterpart"), ("ignored", "not needed")):
        for rule in rules:
            if rule.kind == kind:
                yield _row(rule, words, rule.note)


def _row(rule: Rule, where: str, note: str) -> str:
    default = "" if rule.key.endswith(".*") else f"`{json.dumps(rule.default)}`"
    return f"| `{rule.key}` | {default} | {where} | {note} |"


def page() -> str:
    """Return the whole page."""
    common = {rule.key for rule in COMMON_RULES}
    lines: list[str] = [_HEAD.rstrip()]
    for trainer, rules in TRAINERS.items():
        lines += _section(_TITLES[trainer], [rule for rule in rules if rule.key not in common])
    lines += _section("TRL: every trainer", COMMON_RULES)
    lines += _section("TRL: keys of older versions", OLDER_KEY_RULES)
    lines += ["", "Renamed by TRL: " + ", ".join(f"`{old}` is `{new}`" for old, new in RENAMED_KEYS.items()) + "."]
    lines += _section("verl", VERL)
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
