"""Former names of configuration keys and values, metrics and alarms, in one table for all readers.

    YAML file, overrides, dictionaries, run directories ──► `rename_tree` ──► validation (new names only)
    metrics.jsonl, state.json                           ──► `rename_metrics`, `rename_alarms`

ROLL writes current names only. To rename something, change it everywhere and add a line here. Write a key with enough
enclosing sections to make it unique, without list positions; a renamed key stays in its section.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roll.config.document import Document, KeyPath, format_path

__all__ = [
    "RENAMED_ALARMS",
    "RENAMED_KEYS",
    "RENAMED_METRICS",
    "RENAMED_VALUES",
    "Renames",
    "rename_alarms",
    "rename_config",
    "rename_metric",
    "rename_metrics",
    "rename_path",
    "rename_setting",
    "rename_tree",
    "warn_renamed",
]

logger = logging.getLogger(__name__)

V = TypeVar("V")

RENAMED_KEYS: Mapping[str, str] = {
    "algorithm.credit.back_share": "introduction_share",
    "algorithm.credit.calm_quantile": "waad_quantile",
    "algorithm.credit.introduction": "introduction_window",
    "algorithm.form": "loss_target",
    "algorithm.kl.place": "apply_to",
    "algorithm.kl_form": "kl_variant",
    "algorithm.ratio.token_limit": "max_token_log_ratio",
    "cluster.hand_over": "sharing",
    "cluster.offload_colocated": "sharing",
    "curriculum.least_share": "min_share",
    "distillation.num_top": "top_k",
    "distillation.place": "mode",
    "paper.of": "variant",
    "paper.over": "baseline",
    "reward_model.centring": "centering",
    "rollout.agent.demands": "format_constraints",
    "rollout.agent.when_it_fails": "on_failure",
    "rollout.scheduling.stop_doomed_groups": "early_stop_groups",  # vocabulary: a former name
    "sandbox.patience_s": "reconnect_timeout_s",
    "teacher.place": "backend",
    "tool_calls.form": "format",
    "tool_calls.reads_reasoning": "parse_reasoning",
    "training.close_heap": "malloc_trim",
    "training.mlp_slice_tokens": "tiled_mlp_tokens",
}
"""Maps former keys to the last part of their current names."""

RENAMED_VALUES: Mapping[str, Mapping[str | bool, str]] = {
    "cluster.sharing": {True: "colocated", False: "disaggregated"},
    "distillation.mode": {"kept": "precomputed"},
    "preference.reference": {"kept": "precomputed"},
    "reward.verdict": {"likeliest": "most_likely"},  # vocabulary: a former value
    "rollout.agent.format_constraints": {"refuse": "reject", "tell": "prompt"},
}
"""Maps keys (by current names) and former values to current values."""

RENAMED_METRICS: Mapping[str, str] = {
    "agreement/experts_alike": "agreement/expert_overlap",
    "choice/": "selection/",
    "eval/judged_share": "eval/verified_share",
    "time/hand_over_s": "time/offload_s",
    "training/mismatch/left_out": "training/mismatch/masked",
}
"""Maps former to current names of metrics; a name that ends with `/` stands for all metrics below it."""

RENAMED_ALARMS: Mapping[str, str] = {}
"""Maps former to current names of alarms, in `alarms`, `alarms.stop_on`, `alarm/…` metrics and a run's state."""

_USER_DEFINED_MAPPINGS = frozenset({"options", "env", "environment", "files", "json_schema"})
"""Mappings whose keys the user defines, and which are not renamed."""


@dataclass(kw_only=True, slots=True)
class Renames:
    """The names that `rename_tree` replaced, and the keys that are set under both names."""

    notes: list[str] = field(default_factory=list)
    """`old -> new` of each key and value that was renamed."""
    problems: list[str] = field(default_factory=list)
    """One line for each key that has both names."""


def rename_path(path: KeyPath) -> KeyPath:
    """Replace former names in the path of a key by current names."""
    result: KeyPath = ()
    for part in path:
        result = (*result, part if _is_user_defined(result) else _rename_key(result, part))
    return result


def rename_tree(document: Document) -> tuple[Document, Renames]:
    """Replace former names of keys and values by current ones; each key keeps the line where it was written."""
    renames, origins = Renames(), {rename_path(path): origin for path, origin in document.origins.items()}
    tree = _rename(document.tree, (), (), document, renames)
    return Document(name=document.name, tree=tree, origins=origins), renames


def rename_config(tree: dict[str, Any]) -> dict[str, Any]:
    """Replace former names of keys and values in configuration data by current names."""
    return rename_tree(Document(name="", tree=tree))[0].tree


def rename_setting(key: str, value: Any) -> tuple[str, Any]:
    """Replace former names in a dotted key and in its value by current names."""
    old: KeyPath = tuple(key.split("."))
    new = rename_path(old)
    return format_path(new), _rename(value, old, new, Document(name="", tree={}), Renames())


def rename_metric(name: str) -> str:
    """Return the current name of a metric."""
    if name.startswith("alarm/"):
        return f"alarm/{RENAMED_ALARMS.get(name[6:], name[6:])}"
    if name in RENAMED_METRICS:
        return RENAMED_METRICS[name]
    prefix, slash, last = name.partition("/")
    return f"{RENAMED_METRICS[prefix + slash]}{last}" if prefix + slash in RENAMED_METRICS else name


def rename_metrics(row: Mapping[str, V]) -> dict[str, V]:
    """Return metrics by their current names; the value under a current name replaces one under a former name."""
    # a resumed run writes new names; `null` under a former name must not replace them
    renamed = {rename_metric(name): value for name, value in row.items()}
    return renamed | {name: value for name, value in row.items() if name in renamed}


def rename_alarms(counts: Mapping[str, V]) -> dict[str, V]:
    """Return the counts of alarms by the current names of the alarms."""
    return {RENAMED_ALARMS.get(name, name): value for name, value in counts.items()}


def _rename(value: Any, old_path: KeyPath, new_path: KeyPath, document: Document, renames: Renames) -> Any:
    """Replace former names in a part of a configuration, and record the changes in `renames`.

    Args:
        value: part of a configuration.
        old_path: path of the part in the document.
        new_path: path of the part with current names.
        document: the document, for messages.
        renames: collects changes and problems.
    """
    if isinstance(value, list):
        return [
            _rename(entry, (*old_path, index), (*new_path, index), document, renames)
            for index, entry in enumerate(value)
        ]
    if not isinstance(value, dict):
        return _rename_value(value, new_path, renames)
    if _is_user_defined(new_path):
        return value
    result: dict[Any, Any] = {}
    for key, entry in value.items():
        name = _rename_key(new_path, key)
        if name != key and name in value:
            renames.problems.append(_describe_both_names(document, (*old_path, key), (*old_path, name)))
            continue
        if name != key:
            renames.notes.append(f"{format_path((*old_path, key))} -> {format_path((*new_path, name))}")
        result[name] = _rename(entry, (*old_path, key), (*new_path, name), document, renames)
    return result


def _rename_value(value: Any, path: KeyPath, renames: Renames) -> Any:
    if not isinstance(value, str | bool):
        return value
    words = _get_names(path)
    table: Mapping[Any, str] = (
        RENAMED_ALARMS if words[-2:] == ("alarms", "stop_on") else _find_entry(RENAMED_VALUES, words) or {}
    )
    renamed = table.get(value, value)
    if renamed != value:
        renames.notes.append(f"{format_path(path)}={value} -> {renamed}")
    return renamed


def _describe_both_names(document: Document, old_path: KeyPath, new_path: KeyPath) -> str:
    def format_written(path: KeyPath) -> str:
        origin = document.origins.get(path, "")
        return f"'{format_path(path)}'" + (f" ({origin})" if origin else "")

    old_key, new_key = format_written(old_path), format_written(new_path)
    return f"{old_key} is the former name of {new_key}, and both are set: remove {old_key}."


def _rename_key(section: KeyPath, key: Any) -> Any:
    """Return the current name of a key in a section."""
    if not isinstance(key, str):
        return key
    words = _get_names(section)
    if words[-1:] == ("alarms",) and key in RENAMED_ALARMS:
        return RENAMED_ALARMS[key]
    return _find_entry(RENAMED_KEYS, (*words, key)) or key


def _find_entry(table: Mapping[str, V], words: tuple[str, ...]) -> V | None:
    """Find the entry of a table whose key equals the last 2 or 3 parts of a path.

    Only the last parts are compared because sections occur at different depths.
    """
    return next((table[key] for length in (2, 3) if (key := ".".join(words[-length:])) in table), None)


def _get_names(path: Iterable[Any]) -> tuple[str, ...]:
    return tuple(part for part in path if isinstance(part, str) and not part.isdecimal())


def _is_user_defined(path: KeyPath) -> bool:
    return not _USER_DEFINED_MAPPINGS.isdisjoint(path)


_reported_renames: set[tuple[str, ...]] = set()
"""Renames for which a warning was logged; a run loads its configuration several times."""


def warn_renamed(config_file: str, notes: Iterable[str]) -> None:
    """Log one warning that lists all former names in a configuration, once per process.

    Args:
        config_file: file of the configuration; empty for a dictionary.
        notes: `old -> new` of each name.
    """
    listed = tuple(dict.fromkeys(notes))
    if not listed or (config_file, *listed) in _reported_renames:
        return
    _reported_renames.add((config_file, *listed))
    source = f"'{config_file}'" if config_file else "the configuration"
    logger.warning("%s uses former names, which were replaced: %s. Use the new names.", source, "; ".join(listed))
