"""Whole runs in this process on a tiny random model: what is learnt, recorded, skipped, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos.harness import tiny_config

import roll
from roll.errors import DataError, RunDirectoryError


def config(directory: Path, source: Path, /, **changes: Any) -> dict[str, Any]:
    return {**tiny_config(source, num_steps=2), "output_dir": str(directory), **changes}


def steps(directory: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "train"]


def test_rlvr_run_a_rewarded_letter_becomes_more_frequent(tmp_path: Path, tiny_model: Path) -> None:
    summary = roll.train(
        config(
            tmp_path,
            tiny_model,
            training={"num_steps": 12, "learning_rate": 1e-2, "num_threads": 1},
            rollout={"prompts_per_step": 6, "group_size": 6, "max_new_tokens": 6},
            checkpoint={"at_end": False},
        )
    )
    assert summary.reward_first5 is not None and summary.reward_last5 is not None
    assert summary.reward_last5 > summary.reward_first5 + 0.3


def test_rlvr_run_engine_and_trainer_agree_in_float32_on_every_step(tmp_path: Path, tiny_model: Path) -> None:
    roll.train(config(tmp_path, tiny_model))
    differences = [row["agreement/logprob_mean_abs"] for row in steps(tmp_path) if row["training/stepped"]]
    assert differences
    assert max(differences) <= 1e-4


def test_rlvr_run_a_step_without_gradient_is_recorded_and_changes_nothing(tmp_path: Path, tiny_model: Path) -> None:
    never = [{"source": "arithmetic", "reward": [{"type": "regex", "pattern": "(?!)", "require_finished": False}]}]
    roll.train(config(tmp_path, tiny_model, data=never))
    rows = steps(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["policy_version"] for row in rows] == [0, 0]
    assert [row["data/groups_filtered"] for row in rows] == [3, 3]
    assert all(row.get("training/stepped") is None for row in rows)


def test_rlvr_run_the_distance_to_the_reference_is_penalised(tmp_path: Path, tiny_model: Path) -> None:
    roll.train(config(tmp_path, tiny_model, algorithm={"kl": {"coefficient": 0.1}}))
    penalties = [row["training/policy/kl_reference"] for row in steps(tmp_path) if row["training/stepped"]]
    assert penalties[0] == pytest.approx(0.0, abs=1e-6)  # the first update starts from the reference
    assert penalties[-1] > 0


def test_rlvr_run_adapters_are_trained_and_exported_merged(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = {"path": str(tiny_model), "dtype": "float32", "lora": {"rank": 4}}
    roll.train(config(tmp_path, tiny_model, model=model))
    saved = tmp_path / "run" / "checkpoints" / "step-000002" / "model"
    trained, before = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (saved, tiny_model))
    assert trained.keys() == before.keys()
    changed = [name for name in before if not torch.equal(before[name], trained[name])]
    assert any("q_proj" in name for name in changed)
    assert not any("embed" in name for name in changed)


def test_rlvr_run_engines_that_get_only_the_adapter_generate_as_those_that_get_merged_weights(
    tmp_path: Path, tiny_model: Path
) -> None:
    model = {"path": str(tiny_model), "dtype": "float32", "lora": {"rank": 4, "use_rslora": True}}
    training = {"num_steps": 3, "learning_rate": 1e-2, "num_threads": 1}
    rows = {}
    for lora in ("merged", "adapter"):
        roll.train(
            config(
                tmp_path / lora,
                tiny_model,
                model=model,
                training=training,
                weight_sync={"lora": lora},
                checkpoint={"at_end": False},
            )
        )
        rows[lora] = steps(tmp_path / lora)
    updated = [row for row in rows["adapter"] if row["training/stepped"]]
    assert updated
    assert max(row["agreement/logprob_mean_abs"] for row in updated) <= 1e-4
    assert max(row["sync/probe_mean_abs"] for row in updated if row["sync/probe_mean_abs"] is not None) <= 3e-5
    # Rounding errors are too small to choose another token in a run this short.
    assert [row["reward/mean"] for row in rows["adapter"]] == [row["reward/mean"] for row in rows["merged"]]
    sent = {name: max(row["sync/bytes"] or 0 for row in found) for name, found in rows.items()}
    assert 0 < sent["adapter"] < 0.5 * sent["merged"]  # the model is tiny


def test_rlvr_run_an_adapter_is_exported_as_peft_reads_it_with_the_runs_figures(
    tmp_path: Path, tiny_model: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lora = {"rank": 4, "alpha": 12.0}
    model = {"path": str(tiny_model), "dtype": "float32", "lora": lora}
    training = {"num_steps": 2, "learning_rate": 1e-2, "num_threads": 1}
    summary = roll.train(config(tmp_path, tiny_model, model=model, training=training))
    merged = AutoModelForCausalLM.from_pretrained(roll.export(tmp_path / "run", tmp_path / "merged"))
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model),
        str(roll.export(tmp_path / "run", tmp_path / "adapter", adapter=True)),
    )
    ids = torch.arange(20)[None]
    base = AutoModelForCausalLM.from_pretrained(tiny_model)(ids).logits
    assert not torch.allclose(merged(ids).logits, base, atol=1e-3)
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-5)

    card = (tmp_path / "adapter" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n") and "- grpo\n" in card
    assert f"| mean reward, last 2 steps | {summary.reward_last5:.4g} |" in card
    assert "| `model.lora` | rank 4, alpha 12.0 |" in card and str(tmp_path) not in card and str(tiny_model) not in card
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    with pytest.raises(RunDirectoryError, match="already exists"):
        roll.export(tmp_path / "run", tmp_path / "adapter", adapter=True)


def test_rlvr_run_a_model_that_was_trained_whole_has_no_adapter_to_export(tmp_path: Path, tiny_model: Path) -> None:
    roll.train(config(tmp_path, tiny_model))
    with pytest.raises(RunDirectoryError, match=r"has no adapter: it was trained without `model\.lora`"):
        roll.export(tmp_path / "run", tmp_path / "adapter", adapter=True)
    assert not (tmp_path / "adapter").exists()


def test_rlvr_run_a_run_that_cannot_start_leaves_nothing_behind(tmp_path: Path, tiny_model: Path) -> None:
    missing = [{"source": "file", "path": str(tmp_path / "none.jsonl"), "reward": "exact"}]
    with pytest.raises(DataError, match=r"none\.jsonl"):
        roll.train(config(tmp_path, tiny_model, data=missing))
    assert not (tmp_path / "run").exists()


def test_rlvr_run_a_run_is_never_overwritten(tmp_path: Path, tiny_model: Path) -> None:
    roll.train(config(tmp_path, tiny_model, checkpoint={"at_end": False}))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(RunDirectoryError, match="roll resume"):
        roll.train(config(tmp_path, tiny_model))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
