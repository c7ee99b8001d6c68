"""The README of an exported model: its base model, its training and its metrics.

It contains no path of the machine that trained the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.config.document import dump
from roll.config.history import get_value, read_config, read_history, restore_config
from roll.errors import UserError
from roll.models.catalogue import CATALOGUE
from roll.models.multimodal import has_media_config
from roll.pipelines.checkpoint_files import read_checkpoint
from roll.pipelines.state import RunState
from roll.tracking.metrics_file import read_metrics
from roll.version import __version__

__all__ = ["build_model_card"]

_LISTED_SETTINGS = (
    "pipeline",
    "algorithm.type",
    "algorithm.kl.coefficient",
    "preference.type",
    "preference.beta",
    "reward_model.loss",
    "distillation.mode",
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
_DIFFUSION_METHODS = {"flow_matching": "flow matching", "dpo": "learning from preferences"}
"""Name of the method of a diffusion model by algorithm, unless it is reinforcement learning."""
_MEAN_STEPS = 5


def build_model_card(checkpoint: Path, title: str, *, adapter: bool = False) -> str:
    """Return the model card: Markdown with the header that the Hugging Face hub reads.

    Args:
        checkpoint: The exported checkpoint. If it is not inside a run directory, the card has no metrics.
        title: Name of the model.
        adapter: Whether only the adapter is exported.
    """
    step = read_checkpoint(checkpoint, RunState).state.step
    config = _read_config_at_step(checkpoint, step)
    name = str(get_value(config, "model.path") or "")
    loader, task = _choose_loader(checkpoint / "model", str(get_value(config, "pipeline")))
    lines = [
        "---",
        dump(_build_header(name, config, task, adapter=adapter)).rstrip(),
        "---",
        "",
        f"# {title}",
        "",
        f"{_format_public_name(name) or 'A language model'}, trained for {step} steps of {_get_method(config)} with "
        f"ROLL {__version__}" + (". This is only the adapter, for `peft`:" if adapter else "."),
        "",
        *(_format_usage(name, loader) if adapter else ()),
        *_format_settings(config),
        *_format_metrics(read_metrics(checkpoint.parent.parent / "metrics.jsonl"), step),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _read_config_at_step(checkpoint: Path, step: int) -> dict[str, Any]:
    """Return the configuration of the checkpoint's step."""
    run = checkpoint.resolve().parent.parent
    try:
        return restore_config(read_config(run), read_history(run), step)
    except UserError:  # a checkpoint outside of its run directory
        return {}


def _choose_loader(model: Path, pipeline: str) -> tuple[str, str]:
    """Return the class of `transformers` that loads a model directory, and the model's task on the Hugging Face hub."""
    if pipeline == "diffusion":
        return "", "text-to-image"
    if pipeline == "reward_model":
        return "AutoModelForSequenceClassification", "text-classification"
    if (model / "config.json").is_file() and has_media_config(model):
        return "AutoModelForImageTextToText", "image-text-to-text"
    return "AutoModelForCausalLM", "text-generation"


def _build_header(name: str, config: Mapping[str, Any], task: str, *, adapter: bool) -> dict[str, Any]:
    is_diffusion = get_value(config, "pipeline") == "diffusion"
    on_hub = name.count("/") == 1 and not Path(name).exists() and not name.startswith((".", "/", "~"))
    algorithm = get_value(config, "algorithm.type")
    return {
        "library_name": "peft" if adapter else "diffusers" if is_diffusion else "transformers",
        "pipeline_tag": task,
        **({"base_model": name} if on_hub else {}),
        "tags": [_get_method(config).replace(" ", "-"), "roll", *([str(algorithm)] if algorithm else [])],
    }


def _get_method(config: Mapping[str, Any]) -> str:
    pipeline, algorithm = (str(get_value(config, key)) for key in ("pipeline", "algorithm.type"))
    if pipeline == "diffusion" and algorithm in _DIFFUSION_METHODS:
        return _DIFFUSION_METHODS[algorithm]
    return _METHODS.get(pipeline, "reinforcement learning")


def _format_public_name(name: str) -> str:
    """Return a model's name without the directories of the machine on which it was trained."""
    return f"`{_strip_directories(name)}`" if name else ""


def _strip_directories(name: str) -> str:
    return _escape_cell(name if not Path(name).is_absolute() and not Path(name).exists() else Path(name).name)


def _escape_cell(value: object) -> str:
    """Escape a user-defined value, such as a source's name, for a table cell or code."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("`", "'")


def _format_usage(name: str, loader: str) -> Iterator[str]:
    """Yield the lines that show how to load an adapter on its base model.

    The adapter of a reward model includes the score head.

    Args:
        name: The base model, as given by the user.
        loader: The class of `transformers` that loads it.
    """
    base = f'"{_strip_directories(name)}"'
    options = ", num_labels=1" if loader == "AutoModelForSequenceClassification" else ""
    yield from ("```python", "from peft import PeftModel", f"from transformers import {loader}")
    if name in CATALOGUE:
        yield "from roll.models import resolve_model"
        base = f"resolve_model({base})"
    yield from ("", f"base = {loader}.from_pretrained({base}{options})")
    yield from ('model = PeftModel.from_pretrained(base, "this directory")', "```", "")


def _format_settings(config: Mapping[str, Any]) -> Iterator[str]:
    if not config:
        return
    yield from ("## Training", "", "| setting | value |", "|---|---|")
    for key in _LISTED_SETTINGS:
        value = get_value(config, key)
        if value is not None and (key, value) != ("training.num_steps", 0):  # as many as its epochs have
            yield f"| `{key}` | {_escape_cell(value)} |"
    lora = get_value(config, "model.lora")
    if isinstance(lora, Mapping):
        yield f"| `model.lora` | rank {lora.get('rank')}, alpha {lora.get('alpha')} |"
    for entry in (*config.get("data", ()), *config.get("environments", ())):
        rewards = ", ".join(_escape_cell(part.get("name") or part.get("type")) for part in entry.get("reward", ()))
        given = f"rewards: {rewards}" if "reward" in entry else "examples"
        yield f"| data `{_escape_cell(entry.get('domain') or entry.get('source'))}` | {given} |"
    yield ""


def _format_metrics(rows: Sequence[Mapping[str, Any]], step: int) -> Iterator[str]:
    """Yield the lines with metrics up to the exported step."""
    seen = [row for row in rows if row["step"] <= step]
    rewards = [row["reward/mean"] for row in seen if row["kind"] == "train" and row.get("reward/mean") is not None]
    evaluations = [row for row in seen if row["kind"] == "evaluation"]
    if not rewards and not evaluations:
        return
    yield from ("## Results", "", "| measured | value |", "|---|---|")
    if rewards:
        yield f"| mean reward, first {min(_MEAN_STEPS, len(rewards))} steps | {_format_mean(rewards[:_MEAN_STEPS])} |"
        yield f"| mean reward, last {min(_MEAN_STEPS, len(rewards))} steps | {_format_mean(rewards[-_MEAN_STEPS:])} |"
    for row in dict.fromkeys((0, len(evaluations) - 1)) if evaluations else ():
        for key, value in evaluations[row].items():
            if key.startswith("eval/") and isinstance(value, int | float):
                yield f"| `{_escape_cell(key)}` after step {evaluations[row]['step']} | {value:.4g} |"
    yield ""


def _format_mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4g}"
