"""TRL's side of `bench_sft`: `SFTTrainer` and `DPOTrainer` on the tokens that ROLL learns from, step by step.

Every token that TRL's model is given is counted where it is handed to it, padding left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16", "autocast"]
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How TRL goes through a step's examples."""

    dtype: Dtype
    rows: int
    """Of a forward pass: packed rows, examples, or pairs."""
    passes: int = 1
    """Of a step: `gradient_accumulation_steps`."""
    packing: Literal["bfd", "wrapped", ""] = ""
    """Empty: examples are padded to the longest of the pass."""
    length: int = 1024
    """Tokens of a packed row."""

    @property
    def name(self) -> str:
        """Short, for tables."""
        form = f"{self.packing} {self.length}" if self.packing else "padded"
        return f"{self.dtype}, {form}, {self.rows} x {self.passes}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is trained, and how long."""

    model: str
    num_steps: int
    """Of the optimiser."""
    learning_rate: float


def train_sft(rows: Sequence[dict[str, Any]], setting: Setting, work: Work) -> dict[str, Any]:
    """Steps of `SFTTrainer` on rows with `input_ids`, and `labels` of -100 where nothing is learnt."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    packing: dict[str, Any] = {"packing": bool(setting.packing), "max_length": setting.length}
    if setting.packing:
        packing["packing_strategy"] = setting.packing
    with tempfile.TemporaryDirectory() as directory:
        return _train(SFTTrainer, SFTConfig, Dataset.from_list(list(rows)), setting, work, directory, packing)


def train_dpo(rows: Sequence[dict[str, Any]], setting: Setting, work: Work) -> dict[str, Any]:
    """Steps of `DPOTrainer` on rows with messages; the reference's log-probs are computed before them."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    method = {"precompute_ref_log_probs": True, "beta": 0.1, "max_length": None}
    with tempfile.TemporaryDirectory() as directory:
        return _train(DPOTrainer, DPOConfig, Dataset.from_list(list(rows)), setting, work, directory, method)


def _train(
    trainer_class: Any,
    config_class: Any,
    dataset: Any,
    setting: Setting,
    work: Work,
    directory: str,
    method: dict[str, Any],
) -> dict[str, Any]:
    import torch
    from transformers import TrainerCallback

    from roll.models import load_causal_lm, load_tokenizer, resolve_model

    path = resolve_model(work.model)
    steps: list[dict[str, float]] = []
    counts = {"tokens": 0, "loss_tokens": 0}

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            counts.update(tokens=0, loss_tokens=0)
            self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wall, processor = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
            steps.append({"seconds": wall, "processor_seconds": processor, **counts})

    class Counted(trainer_class):  # the same trainer, whose inputs are counted
        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
            real = inputs.get("attention_mask")
            counts["tokens"] += int(inputs["input_ids"].numel() if real is None else real.sum())
            learnt = inputs["labels"] != -100 if "labels" in inputs else inputs["completion_mask"]
            counts["loss_tokens"] += int(learnt.sum())
            return super().training_step(model, inputs, *rest, **named)

    trainer = Counted(
        model=load_causal_lm(path, torch.bfloat16 if setting.dtype == "bfloat16" else torch.float32),
        processing_class=load_tokenizer(path),
        train_dataset=dataset,
        callbacks=[Clock()],
        args=config_class(
            output_dir=directory,
            use_cpu=True,
            bf16=setting.dtype == "autocast",
            gradient_checkpointing=False,
            per_device_train_batch_size=setting.rows,
            gradient_accumulation_steps=setting.passes,
            max_steps=work.num_steps,
            learning_rate=work.learning_rate,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=SEED,
            **method,
        ),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"steps": steps, "losses": losses, "num_threads": torch.get_num_threads()}
