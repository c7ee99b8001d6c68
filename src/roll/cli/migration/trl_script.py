"""Converts a Python script that trains with TRL to keys of TRL's command line; the script is never run.

    GRPOConfig(...)                       keys, by their own names
    GRPOTrainer(model, reward_funcs, …)   model_name_or_path, reward_funcs, …
    load_dataset(...), LoraConfig(...)    dataset_name, …, lora_r, …

Values that cannot be determined without running the script are omitted, and listed by name and line: see
`script_values`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.cli.migration.convert import KeyResult
from roll.cli.migration.script_values import NotConstantError, SyntaxTree, format_source
from roll.cli.migration.trl_script_parts import (
    IGNORED_MODEL_ARGUMENTS,
    MODEL_KEYS,
    PEFT_DEFAULTS,
    PEFT_KEYS,
    TRL_REWARDS,
    ScriptDataset,
    read_dataset,
)
from roll.errors import ConfigError

__all__ = ["ParsedScript", "read_script"]

_TRAINERS = {"GRPOTrainer": "grpo", "SFTTrainer": "sft", "DPOTrainer": "dpo", "RewardTrainer": "reward"}
_CONFIGS = {"GRPOConfig": "grpo", "SFTConfig": "sft", "DPOConfig": "dpo", "RewardConfig": "reward"}
_ARGUMENT_ORDER = {
    "grpo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "sft": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "dpo": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "reward": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
}
"""Positional arguments of the constructors of TRL 1.16."""
_READ_ARGUMENTS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "peft_config", "processing_class")
_OTHER_TRAINER_PATTERN = re.compile(r"[A-Z]\w*Trainer")
_MAX_FILE_BYTES = 2**20
"""Maximum bytes of a script."""
_DEFAULT_NOTE = "TRL's default is used instead"


@dataclass(eq=False, slots=True)
class ParsedScript:
    """TRL's keys and values that were read from a script."""

    trainer: str = ""
    """`grpo`, `sft`, `dpo` or `reward`."""
    values: dict[str, Any] = field(default_factory=dict)
    """Keys of TRL's command line, with their values."""
    unreadable: list[KeyResult] = field(default_factory=list)
    """Values that could not be read."""


def read_script(path: str | Path) -> ParsedScript:
    """Read the trainer and its configuration from a Python script that uses TRL; the script is not run.

    Raises:
        ConfigError: the file cannot be read, is not Python, or does not train with exactly one supported trainer.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} exceeds {_MAX_FILE_BYTES:,} bytes, the maximum size of a script.")
        tree = ast.parse(text)  # bytes, so that the parser handles encoding declarations
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: the file is not valid Python ({error.msg}).") from None
    except ValueError as error:  # not UTF-8, or a NUL
        raise ConfigError(f"{path} is not a Python script: {error}.") from None
    except (RecursionError, MemoryError):
        raise ConfigError(f"{path} is nested too deeply to be read.") from None
    try:
        return _Reader(str(path), tree).read()
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be read.") from None


class _Reader:
    def __init__(self, path: str, tree: ast.Module) -> None:
        self._path = path
        self._syntax = SyntaxTree(tree, lambda name: name in _TRAINERS or name in _CONFIGS or name in _SUPPORTED_CALLS)
        self._script = ParsedScript()

    def read(self) -> ParsedScript:
        calls = [node for node in self._syntax.nodes if isinstance(node, ast.Call)]
        own = dict(self._find_subclasses())
        self._report_lookalike_classes()
        trainers = [(call, kind) for call in calls if (kind := self._find_trainer_name(call, own)) in _TRAINERS]
        configs = [call for call in calls if self._syntax.get_called_name(call) in _CONFIGS]
        self._check_number("trainer", [call for call, _ in trainers])
        if trainers:
            ((call, kind),) = trainers
            self._script.trainer = _TRAINERS[kind]
            self._read_trainer(call)
        else:
            self._check_number("configuration", configs)
            if not configs:
                self._reject_calls(calls)
            self._script.trainer = _CONFIGS[self._syntax.get_called_name(configs[0])]
            self._read_config(configs[0])
        return self._script

    def _find_subclasses(self) -> Iterator[tuple[str, str]]:
        """Yield trainer classes of the script with their base class in TRL; report that methods are not converted."""
        for node in self._syntax.nodes:
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                name = getattr(base, "attr", getattr(base, "id", ""))
                name = self._syntax.imported.get(name, name)
                if name in _TRAINERS and isinstance(node, ast.ClassDef):
                    yield node.name, name
                    self._report(
                        node.name, node, "the methods of a class defined in the script are not converted", name
                    )

    def _report_lookalike_classes(self) -> None:
        """Report classes that have the name of a TRL class but are not from TRL; their defaults may differ."""
        for node in self._syntax.nodes:
            if isinstance(node, ast.ClassDef) and node.name in (*_CONFIGS, *_TRAINERS):
                self._report(node.name, node, "the class defined in the script is treated as TRL's class", node.name)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] != "trl":
                for one in node.names:
                    if one.name in (*_CONFIGS, *_TRAINERS):
                        self._report(
                            one.name, node, f"imported from `{node.module}` and treated as TRL's class", one.name
                        )

    def _find_trainer_name(self, call: ast.Call, subclasses: Mapping[str, str]) -> str:
        name = self._syntax.get_called_name(call)
        return subclasses.get(name, name)

    def _check_number(self, kind: str, calls: list[ast.Call]) -> None:
        if len(calls) > 1:
            lines = ", ".join(str(call.lineno) for call in calls)
            raise ConfigError(
                f"{self._path} creates {len(calls)} {kind}s (lines {lines}): write a script with only one of them, and "
                "convert it."
            )

    def _reject_calls(self, calls: list[ast.Call]) -> None:
        known = ", ".join(_TRAINERS)
        for call in calls:
            if _OTHER_TRAINER_PATTERN.fullmatch(name := self._syntax.get_called_name(call)):
                raise ConfigError(f"{self._path}:{call.lineno}: {name} is not supported. Supported: {known}.")
        raise ConfigError(f"{self._path} does not call a supported trainer of TRL. Supported: {known}.")

    def _report(self, key: str, node: ast.AST, reason: str, value: Any = None) -> None:
        shown = format_source(node) if value is None else value
        text = f"line {getattr(node, 'lineno', 0)}: {reason}"
        self._script.unreadable.append(KeyResult(key=key, value=shown, in_file=True, outcome="unsupported", text=text))

    def _read_value(self, key: str, node: ast.expr) -> Any:
        """Store the value of `node` under `key`, and return it; if it cannot be read, report the key."""
        try:
            self._script.values[key] = self._syntax.evaluate(node)
        except NotConstantError as reason:
            self._report(key, node, f"{reason}; {_DEFAULT_NOTE}")
        return self._script.values.get(key)

    def _read_keywords(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """Yield a call's arguments by name, including those of a dictionary that is passed as `**`."""
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield keyword.arg, keyword.value
                continue
            try:
                found = self._syntax.evaluate(keyword.value)
                if not isinstance(found, dict):
                    raise NotConstantError(f"`{format_source(keyword.value)}` is not a dictionary")
            except NotConstantError as reason:
                self._report(f"**{format_source(keyword.value)}", keyword.value, f"{reason}; {_DEFAULT_NOTE}")
                continue
            for name, value in found.items():
                entry = ast.copy_location(ast.Constant(value=value), keyword.value)
                self._syntax.known[entry] = value
                yield name, entry

    def _read_trainer(self, call: ast.Call) -> None:
        order = _ARGUMENT_ORDER[self._script.trainer]
        arguments: dict[str, ast.expr] = {}
        for place, node in enumerate(call.args):
            if isinstance(node, ast.Starred) or place >= len(order):
                self._report(
                    f"argument {place + 1}", node, f"trainer arguments must be passed by name; {_DEFAULT_NOTE}"
                )
                break
            arguments[order[place]] = node
        arguments |= dict(self._read_keywords(call))
        if "tokenizer" in arguments:
            arguments.setdefault("processing_class", arguments.pop("tokenizer"))
        for name in sorted(
            arguments, key=lambda name: _READ_ARGUMENTS.index(name) if name in _READ_ARGUMENTS else len(_READ_ARGUMENTS)
        ):
            node = arguments[name]
            if isinstance(node, ast.Constant) and node.value is None:
                continue
            if name in _READ_ARGUMENTS:
                getattr(self, f"_read_{name}")(node)
            else:
                self._report(name, node, f"the trainer's argument `{name}` has no counterpart in ROLL")

    def _read_args(self, node: ast.expr) -> None:
        try:
            config = self._syntax.resolve(node)
            is_one = isinstance(config, ast.Call) and self._syntax.get_called_name(config) in (
                *_CONFIGS,
                "TrainingArguments",
            )
            if not is_one:
                given, found = format_source(node), format_source(config)
                subject = f"`{given}`" if given == found else f"`{given}`, which is `{found}`,"
                raise NotConstantError(f"{subject} is not a configuration class of TRL, such as `GRPOConfig`")
        except NotConstantError as reason:
            self._report("args", node, f"{reason}; {_DEFAULT_NOTE}")
            return
        assert isinstance(config, ast.Call)
        self._read_config(config)
        if isinstance(node, ast.Name):
            self._drop_changed_values(node)

    def _drop_changed_values(self, name: ast.Name) -> None:
        """Drop and report the attributes of the training arguments `name` that the script sets after their creation.

        At that point, TRL has already derived other values from the original ones.
        """
        bindings = self._syntax.scopes[name].find(name.id)
        later = f"the value is set after `{name.id}` was created; pass it to the call that creates `{name.id}`"
        for node in self._syntax.nodes:
            if not isinstance(node, ast.Name) or self._syntax.scopes[node].find(node.id) is not bindings:
                continue
            parent = self._syntax.parents[node]
            if isinstance(parent, ast.Attribute) and not isinstance(parent.ctx, ast.Load):
                self._script.values.pop(parent.attr, None)
                self._report(parent.attr, parent, later)
            elif isinstance(parent, ast.Attribute) and parent.attr.startswith("set_"):
                self._report(f"{name.id}.{parent.attr}", self._syntax.parents[parent], later)
            elif isinstance(parent, ast.Call) and self._syntax.get_called_name(parent) == "setattr":
                self._report(f"setattr({name.id}, …)", parent, later)

    def _read_config(self, call: ast.Call) -> None:
        for place, node in enumerate(call.args):
            if place == 0 and not isinstance(node, ast.Starred):
                self._read_value("output_dir", node)
            else:
                self._report(f"argument {place + 1}", node, f"arguments must be passed by name; {_DEFAULT_NOTE}")
        for name, node in self._read_keywords(call):
            self._read_value(name, node)

    def _read_model(self, node: ast.expr) -> None:
        try:
            made = self._syntax.resolve(node)
            if not (isinstance(made, ast.Call) and self._syntax.get_called_name(made) == "from_pretrained"):
                made = None
        except NotConstantError as reason:
            self._report("model_name_or_path", node, f"{reason}; {_DEFAULT_NOTE}")
            return
        if made is None:
            self._read_value("model_name_or_path", node)
            return
        named = {"pretrained_model_name_or_path": made.args[0]} if made.args else {}
        for name, value in (named | dict(self._read_keywords(made))).items():
            if name == "pretrained_model_name_or_path":
                self._read_value("model_name_or_path", value)
            elif name in MODEL_KEYS:
                self._read_value(MODEL_KEYS[name], value)
            elif name not in IGNORED_MODEL_ARGUMENTS:
                self._report(name, value, "an argument of from_pretrained without a counterpart in ROLL")

    def _read_reward_funcs(self, node: ast.expr) -> None:
        entries = [node]
        with suppress(NotConstantError):  # not static if it is a function
            found = self._syntax.resolve(node)
            entries = found.elts if isinstance(found, ast.List | ast.Tuple) else [node]
        if isinstance(node, ast.Name) and entries != [node]:
            try:
                self._syntax.check_unchanged(node)
            except NotConstantError as reason:
                self._report("reward_funcs", node, f"{reason}; {_DEFAULT_NOTE}")
                return
        names: list[str] = []
        for place, entry in enumerate(entries):
            try:
                names.append(self._read_reward(entry, place))
            except NotConstantError as reason:
                self._report(f"reward_funcs[{place}]", entry, f"{reason}; {_DEFAULT_NOTE}")
        if any(names):
            self._script.values["reward_funcs"] = [name for name in names if name]

    def _read_reward(self, node: ast.expr, index: int) -> str:
        """Return a reward function's name as on TRL's command line; for a reward model, store its name, and return "".

        Raises:
            NotConstantError: `node` is neither a function nor a model's name, or a model is not the first reward.
        """
        if isinstance(node, ast.Attribute) and node.attr in TRL_REWARDS:
            return node.attr
        if isinstance(node, ast.Name) and len(self._syntax.scopes[node].find(node.id)) == 1:
            if node.id in self._syntax.imported:
                name = self._syntax.imported[node.id]
                return name if name in TRL_REWARDS else f"{self._find_module(node)}.{name}"
            if self._syntax.scopes[node].find(node.id)[0].kind == "defined in the script":
                return f"{Path(self._path).stem}.{node.id}"
        model = self._syntax.evaluate(node)
        if not isinstance(model, str):
            raise NotConstantError(f"`{format_source(node)}` must be a function or the name of a model")
        if index:
            raise NotConstantError(f"the reward model '{model}' must be the first of reward_funcs")
        self._script.values["reward_model_name_or_path"] = model
        return ""

    def _find_module(self, name: ast.Name) -> str:
        for node in self._syntax.nodes:
            names = node.names if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name.id for one in names):
                return node.module or Path(self._path).parent.name
        raise NotConstantError(f"`{name.id}` is a module, not a function")

    def _read_dataset(self, key: str, node: ast.expr) -> ScriptDataset | None:
        try:
            rows = read_dataset(self._syntax, node)
        except NotConstantError as reason:
            self._report(key, node, f"{reason}; prepare the rows in a file: data.0.path")
            return None
        for method, line in rows.changes:
            self._report(
                key, line, f"rows are changed by `.{method}(…)`: prepare the changed rows in a file", f".{method}"
            )
        return rows

    def _read_train_dataset(self, node: ast.expr) -> None:
        if (rows := self._read_dataset("train_dataset", node)) is None:
            return
        found = {"dataset_name": rows.path, "dataset_config": rows.name, "dataset_train_split": rows.split}
        self._script.values |= {key: value for key, value in found.items() if value is not None}

    def _read_eval_dataset(self, node: ast.expr) -> None:
        if (rows := self._read_dataset("eval_dataset", node)) is None:
            return
        if rows.path == self._script.values.get("dataset_name") and rows.split is not None:
            self._script.values["dataset_test_split"] = rows.split
        else:
            self._report("eval_dataset", node, "held-out rows of another dataset: set data.0.held_out_path")

    def _read_peft_config(self, node: ast.expr) -> None:
        try:
            made = self._syntax.resolve(node)
            if not (isinstance(made, ast.Call) and self._syntax.get_called_name(made) == "LoraConfig"):
                raise NotConstantError(f"`{format_source(made)}` is not a LoraConfig")
        except NotConstantError as reason:
            self._report("peft_config", node, f"{reason}; {_DEFAULT_NOTE}")
            return
        self._script.values |= {"use_peft": True, **PEFT_DEFAULTS}
        if made.args:
            self._report("peft_config", made.args[0], f"arguments must be passed by name; {_DEFAULT_NOTE}")
        for name, value in self._read_keywords(made):
            if name in PEFT_KEYS:
                key = PEFT_KEYS[name]
                if key in PEFT_DEFAULTS:
                    del self._script.values[key]
                self._read_value(key, value)
            elif not (name == "bias" and isinstance(value, ast.Constant) and value.value == "none"):
                self._report(name, value, "an argument of LoraConfig without a counterpart in ROLL")

    def _read_processing_class(self, node: ast.expr) -> None:
        try:
            made = self._syntax.resolve(node)
            name = self._syntax.evaluate(made.args[0]) if isinstance(made, ast.Call) and made.args else None
        except NotConstantError:
            name = None
        if name is None or name != self._script.values.get("model_name_or_path"):
            self._report(
                "processing_class",
                node,
                "the model's own tokenizer is used; copy this tokenizer into the model's directory",
            )


_SUPPORTED_CALLS = ("LoraConfig", "from_pretrained", "load_dataset")
