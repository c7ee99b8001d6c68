"""The README of an exported model: its base model, its training and its metrics.

It contains no path of the machine that trained the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.config.document import dump
from roll.config.history import config_at, read_config, read_history, value_at
from roll.errors import UserError
from roll.models.catalogue import CATALOGUE
from roll.pipelines.checkpoint_files import read_checkpoint
from roll.pipelines.state import RunState
from roll.tracking.metrics_file import read_metrics
from roll.version import __version__

__all__ = ["model_card"]

_SETTINGS = (
    "pipeline",
    "algorithm.type",
    "algorithm.kl.coefficient",
    "preference.type",
    "preference.beta",
    "reward_model.loss",
    "distillation.place",
    "distillation.divergence",
    "rollout.prompts_per_step",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.scheduling.async_ratio",
    "training.learning_rate",
    "training.num_steps",
    "training.num_epochs",
    "training.examples_per_step",
    "model.dtype",
    "seed",
)
_METHODS = {
    "distill": "distillation",
    "distill_offline": "distillation",
    "preference": "learning from preferences",
    "preference_online": "learning from preferences",
    "rejection_sampling": "rejection sampling",
    "reward_model": "training as a reward model",
    "sft": "supervised fine-tuning",
}
"""Name of the method by pipeline, unless it is reinforcement learning."""
_RECENT = 5


def model_card(checkpoint: Path, title: str, *, adapter: bool = False) -> str:
    """Return the model card: Markdown with the header that the Hugging Face hub reads.

    Args:
        checkpoint: The exported checkpoint, inside its run directory; elsewhere the card has no metrics.
        title: Name of the model.
        adapter: Whether only the adapter is exported.
    """
    step = read_checkpoint(checkpoint, RunState).state.step
    config = _config(checkpoint, step)
    name = str(value_at(config, "model.path") or "")
    lines = [
        "---",
        dump(_header(name, config, adapter=adapter)).rstrip(),
        "---",
        "",
        f"# {title}",
        "",
        f"{_public_name(name) or 'A language model'}, trained for {step} steps of {_method_of(config)} with "
        f"ROLL {__version__}" + (". This is the adapter alone, for `peft`:" if adapter else "."),
        "",
        *(_use(name, scores=value_at(config, "pipeline") == "reward_model") if adapter else ()),
        *_settings(config),
        *_metric_lines(read_metrics(checkpoint.parent.parent / "metrics.jsonl"), step),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _config(checkpoint: Path, step: int) -> dict[str, Any]:
    """Return the configuration with which the checkpoint's step was trained."""
    run = checkpoint.resolve().parent.parent
    try:
        return config_at(read_config(run), read_history(run), step)
    except UserError:  # a checkpoint outside of its run directory
        return {}


def _header(name: str, config: Mapping[str, Any], *, adapter: bool) -> dict[str, Any]:
    scores = value_at(config, "pipeline") == "reward_model"
    on_hub = name.count("/") == 1 and not Path(name).exists() and not name.startswith((".", "/", "~"))
    algorithm = value_at(config, "algorithm.type")
    return {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-classification" if scores else "text-generation",
        **({"base_model": name} if on_hub else {}),
        "tags": [_method_of(config).replace(" ", "-"), "roll", *([str(algorithm)] if algorithm else [])],
    }


def _method_of(config: Mapping[str, Any]) -> str:
    return _METHODS.get(str(value_at(config, "pipeline")), "reinforcement learning")


def _public_name(name: str) -> str:
    """Return a model's name without directories of the machine that trained it."""
    return f"`{_bare(name)}`" if name else ""


def _bare(name: str) -> str:
    return _cell(name if not Path(name).is_absolute() and not Path(name).exists() else Path(name).name)


def _cell(value: object) -> str:
    """Escape a user-defined value, such as a source's name, for a table cell or code."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("`", "'")


def _use(name: str, *, scores: bool = False) -> Iterator[str]:
    """Yield the lines that show how to load an adapter on its base model; a reward model's adapter includes the score
    head.
    """
    base, kind = f'"{_bare(name)}"', "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
    yield from ("```python", "from peft import PeftModel", f"from transformers import {kind}")
    if name in CATALOGUE:
        yield "from roll.models import resolve_model"
        base = f"resolve_model({base})"
    yield from ("", f"base = {kind}.from_pretrained({base}{', num_labels=1' if scores else ''})")
    yield from ('model = PeftModel.from_pretrained(base, "this directory")', "```", "")


def _settings(config: Mapping[str, Any]) -> Iterator[str]:
    if not config:
        return
    yield from ("## Training", "", "| setting | value |", "|---|---|")
    for key in _SETTINGS:
        value = value_at(config, key)
        if value is not None and (key, value) != ("training.num_steps", 0):  # as many as its epochs have
            yield f"| `{key}` | {_cell(value)} |"
    lora = value_at(config, "model.lora")
    if isinstance(lora, Mapping):
        yield f"| `model.lora` | rank {lora.get('rank')}, alpha {lora.get('alpha')} |"
    for entry in (*config.get("data", ()), *config.get("environments", ())):
        rewards = ", ".join(_cell(part.get("name") or part.get("type")) for part in entry.get("reward", ()))
        given = f"rewards: {rewards}" if "reward" in entry else "examples"
        yield f"| data `{_cell(entry.get('domain') or entry.get('source'))}` | {given} |"
    yield ""


def _metric_lines(rows: Sequence[Mapping[str, Any]], step: int) -> Iterator[str]:
    """Yield the lines with metrics up to the exported step."""
    seen = [row for row in rows if row["step"] <= step]
    rewards = [row["reward/mean"] for row in seen if row["kind"] == "train" and row.get("reward/mean") is not None]
    evaluations = [row for row in seen if row["kind"] == "evaluation"]
    if not rewards and not evaluations:
        return
    yield from ("## Figures", "", "| measured | value |", "|---|---|")
    if rewards:
        yield f"| mean reward, first {min(_RECENT, len(rewards))} steps | {_mean(rewards[:_RECENT])} |"
        yield f"| mean reward, last {min(_RECENT, len(rewards))} steps | {_mean(rewards[-_RECENT:])} |"
    for row in dict.fromkeys((0, len(evaluations) - 1)) if evaluations else ():
        for key, value in evaluations[row].items():
            if key.startswith("eval/") and isinstance(value, int | float):
                yield f"| `{_cell(key)}` after step {evaluations[row]['step']} | {value:.4g} |"
    yield ""


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4g}"
