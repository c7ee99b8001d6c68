"""Parts of a TRL script that belong to other libraries: models, adapters and data sets."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Any

from roll.cli.migration.script_values import NotConstantError, SyntaxTree, format_source

__all__ = [
    "IGNORED_MODEL_ARGUMENTS",
    "MODEL_KEYS",
    "PEFT_DEFAULTS",
    "PEFT_KEYS",
    "TRL_REWARDS",
    "ScriptDataset",
    "read_dataset",
]

MODEL_KEYS = {
    "attn_implementation": "attn_implementation",
    "dtype": "dtype",
    "revision": "model_revision",
    "torch_dtype": "dtype",
    "trust_remote_code": "trust_remote_code",
    "use_cache": "use_cache",
}
"""Arguments of `from_pretrained`, and their names on TRL's command line."""
IGNORED_MODEL_ARGUMENTS = ("device_map", "low_cpu_mem_usage")
"""Arguments that set where weights are loaded, which cluster.device_mapping does in ROLL."""
PEFT_KEYS = {
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "modules_to_save": "lora_modules_to_save",
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "task_type": "lora_task_type",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
}
"""Arguments of `LoraConfig`, and their names on TRL's command line."""
PEFT_DEFAULTS: dict[str, Any] = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Defaults of `LoraConfig` that differ from those of TRL's command line."""
TRL_REWARDS = (
    "accuracy_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
)
"""Functions of TRL that its command line accepts by name."""
_FILE_FORMATS = ("json", "parquet")
_ROW_PRESERVING_METHODS = ("shuffle",)
"""Methods that keep the rows of a data set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptDataset:
    """A data set that a script loads, and how its rows are changed afterward."""

    path: str
    """A file, or the name of a data set on a hub."""
    name: str | None = None
    split: str | None = None
    changes: tuple[tuple[str, ast.AST], ...] = ()
    """Methods that change the rows, each with the line of its call."""


def read_dataset(syntax: SyntaxTree, node: ast.expr) -> ScriptDataset:
    """Return the data set of an expression: the arguments of `load_dataset`, and later methods that change its rows.

    Raises:
        NotConstantError: the rows do not come from `load_dataset`, or an argument cannot be read.
    """
    match node:
        case ast.Name():
            return _read_dataset_of_name(syntax, node)
        case ast.Subscript():
            split = syntax.evaluate(node.slice)
            if not isinstance(split, str):
                raise NotConstantError(f"`{format_source(node)}` is not a split")
            return replace(read_dataset(syntax, node.value), split=split)
        case ast.Call() if syntax.get_called_name(node) == "load_dataset":
            return _read_load_call(syntax, node)
        case ast.Call(func=ast.Attribute(value=inner, attr=method)) if not _is_imported(syntax, inner):
            rows = read_dataset(syntax, inner)
            return rows if method in _ROW_PRESERVING_METHODS else replace(rows, changes=(*rows.changes, (method, node)))
    raise NotConstantError(f"`{format_source(node)}` is not a call of load_dataset")


def _is_imported(syntax: SyntaxTree, node: ast.expr) -> bool:
    """Return whether the node is an imported class or module, such as `Dataset` in `Dataset.from_list`."""
    return isinstance(node, ast.Name) and node.id in syntax.imported


def _read_dataset_of_name(syntax: SyntaxTree, node: ast.Name) -> ScriptDataset:
    """Return the data set that a name refers to; reassignments must be of the form `rows = rows.map(f)`."""
    found = syntax.scopes[node].find(node.id)
    if len(found) <= 1:
        return read_dataset(syntax, syntax.find_bound_expression(node))
    if any(one.value is None or one.is_conditional for one in found):
        lines = ", ".join(str(one.line) for one in found)
        raise NotConstantError(f"`{node.id}` is assigned on lines {lines}")
    first, *others = (one.value for one in found)
    assert first is not None
    rows = read_dataset(syntax, first)
    for value in others:
        root: ast.expr | None = value
        changes: list[tuple[str, ast.AST]] = []
        while isinstance(root, ast.Call) and isinstance(root.func, ast.Attribute):
            changes.insert(0, (root.func.attr, root))
            root = root.func.value
        if isinstance(root, ast.Subscript):
            rows = replace(rows, split=str(syntax.evaluate(root.slice)))
            root = root.value
        if not (isinstance(root, ast.Name) and root.id == node.id):
            raise NotConstantError(f"`{node.id}` is assigned on lines {', '.join(str(one.line) for one in found)}")
        changes = [one for one in changes if one[0] not in _ROW_PRESERVING_METHODS]
        rows = replace(rows, changes=(*rows.changes, *changes))
    return rows


def _read_load_call(syntax: SyntaxTree, call: ast.Call) -> ScriptDataset:
    given: dict[str, Any] = {}
    for name, argument in zip(("path", "name"), call.args, strict=False):
        given[name] = syntax.evaluate(argument)
    if len(call.args) > 2 or any(keyword.arg is None for keyword in call.keywords):
        raise NotConstantError(f"the arguments of `{format_source(call)}` must be passed by name")
    given |= {keyword.arg: syntax.evaluate(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    path, split, files = given.pop("path", None), given.pop("split", None), given.pop("data_files", None)
    name = given.pop("name", None)
    given.pop("streaming", None)  # streaming yields the same rows
    if given:
        raise NotConstantError(f"the arguments {', '.join(given)} of load_dataset have no counterpart")
    if path in _FILE_FORMATS and isinstance(files, str) and files.endswith((".jsonl", ".parquet")):
        path, files = files, None
    if files is not None or not isinstance(path, str) or not isinstance(split, str | None):
        raise NotConstantError(f"`{format_source(call)}` does not load exactly one file or dataset, with one split")
    return ScriptDataset(path=path, name=name, split=split)
