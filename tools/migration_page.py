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
from roll.cli.migration.verl_rules import VERL_RULES

__all__ = ["page"]

_HEAD = f"""\
# Migrate from TRL or verl

*Generated from the conversion rules in `src/roll/cli/migration/`: change them there.*

This page shows how to convert configurations and training scripts of TRL and verl to configurations of ROLL, and lists
the conversion of each key. The commands `roll config from-trl` and `roll config from-verl` convert a file:

```
roll config from-trl grpo.yaml -o run.yaml             # a configuration of `trl grpo`
roll config from-trl grpo.yaml --processes 8           # the run used 8 processes, which multiply TRL's batch size
roll config from-trl train_grpo.py --rows 7473         # a script that calls GRPOTrainer; it is parsed, never executed
roll config from-verl run_grpo.sh --rows 7473          # a script with overrides of verl.trainer.main_ppo, or a .yaml
roll check run.yaml
```

The commands print the converted configuration, or write it to the file in `-o`. For every key of the input, they report
the result on standard error: the new key, that ROLL's default has the same value, that the key is not needed, or why it
could not be converted. Comments at the top of the new file also list the keys that were not converted. If a default of
the other library differs from ROLL's default (for example loss, clip, KL, group and batch sizes, learning rate or
schedule), the new file contains its value, so that the run has the same settings.

From a Python script, `from-trl` reads the arguments of `GRPOConfig`, `SFTConfig`, `DPOConfig` or `RewardConfig`, and
the arguments of the trainer, `load_dataset`, `from_pretrained` and `LoraConfig`. It evaluates constants, names that are
assigned a single constant, lists and dictionaries of these, and simple arithmetic. It cannot evaluate other
expressions, such as `os.environ`, a command-line argument, or a name that is assigned twice. It reports the line of
such an expression and uses TRL's default. To set the value, add for example `--set learning_rate=1e-6`. All errors of a
file are reported at once.

The following settings need your attention:

- **Steps.** An epoch of TRL or verl is a pass over the rows. A step of ROLL is one round of generation with all its
  updates. If a file sets a number of epochs, pass the number of rows of the dataset with `--rows`.
- **Reward functions.** ROLL calls a reward with one answer, `def reward(text, answer, metadata) -> float`, in worker
  processes (see [Rewards](rewards.md)). Reward functions for verl work without changes, because ROLL passes the
  arguments `(data_source, solution_str, ground_truth, extra_info)` by name. Reward functions for TRL receive all
  completions at once. The new file names your function, but you must rewrite it.
- **Reference answers.** verl reads reference answers from `reward_model.ground_truth`, but ROLL reads them from a
  column. This script adds the column:

```python
import pyarrow.parquet as parquet

table = parquet.read_table("data/gsm8k/train.parquet")
answers = [row["ground_truth"] for row in table["reward_model"].to_pylist()]
parquet.write_table(table.append_column("answer", [answers]), "data/gsm8k/train-roll.parquet")
```

The tables below list the keys of TRL {TRL_VERSION} and of verl at {VERL_COMMIT}. Keys of other
versions are reported as unknown. In the column `note`, `with KEY` means that the key is converted together with KEY,
and `x` means multiplication. `no counterpart` means that ROLL has no such key, and `not needed` means that a run of
ROLL does not depend on it.
"""
_TITLES = {"grpo": "TRL: GRPO", "sft": "TRL: supervised fine-tuning", "dpo": "TRL: DPO", "reward": "TRL: reward models"}
_LEADS = {
    "TRL: GRPO": "These keys of `GRPOConfig` and `trl grpo` are converted as follows",
    "TRL: supervised fine-tuning": "These keys of `SFTConfig` and `trl sft` are converted as follows",
    "TRL: DPO": "These keys of `DPOConfig` and `trl dpo` are converted as follows",
    "TRL: reward models": "These keys of `RewardConfig` and `trl reward` are converted as follows",
    "TRL: every trainer": "These keys have the same conversion for all trainers of TRL",
    "TRL: keys of older versions": "TRL has removed these keys, but the commands still convert them",
    "verl": "These keys of verl are converted as follows",
}


def _section(title: str, rules: Sequence[Rule]) -> Iterator[str]:
    yield from ("", f"## {title}", "", f"{_LEADS[title]}:", "")
    yield from ("| key | default | key in ROLL | note |", "|---|---|---|---|")
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
    lines += [
        "",
        "TRL has renamed these keys: " + ", ".join(f"`{old}` to `{new}`" for old, new in RENAMED_KEYS.items()) + ".",
    ]
    lines += _section("verl", VERL_RULES)
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
