"""Checks of engines that compute in 8 bits, and what `roll check` says about them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import roll
from roll.config.engines import check_engine
from roll.config.judge import JudgeConfig
from roll.config.pipelines.rlvr import RLVRConfig
from roll.config.pipelines.sft import SFTConfig
from roll.errors import ConfigError
from roll.pipelines.quantization import check_judge_quantization, check_quantization, describe_quantization
from roll.pipelines.supervised.preparation import prepare as prepare_supervised


def make_config(path: Path | str, **sections: Any) -> RLVRConfig:
    settings = {
        "name": "x",
        "model": {"path": str(path), "dtype": "bfloat16"},
        "inference": {"engine": "vllm", "quantization": "int8"},
        "training": {"num_steps": 1},
        "rollout": {"max_new_tokens": 8},
        "data": [{"source": "arithmetic", "reward": "math"}],
    }
    return RLVRConfig.model_validate(settings | sections)


def with_settings(model: Path, place: Path, **settings: Any) -> Path:
    """A copy of a model whose config.json has other settings."""
    shutil.copytree(model, place)
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return place


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"weight_sync": {"quantization": "fp8"}},
            "weight_sync.quantization fp8 differs from inference.quantization int8, in which engines receive weights: "
            "remove weight_sync.quantization, or set it to int8",
        ),
        (
            {"weight_sync": {"lora": "adapter"}, "model": {"path": "x", "lora": {"rank": 4}}},
            "weight_sync.lora is 'adapter', but inference.quantization (int8) requires that all weights are sent: "
            "set inference.quantization to none, or set weight_sync.lora to merged",
        ),
    ],
)
def test_quantization_conflicting_with_the_sync_is_rejected(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_config("x", **sections)
    assert message in str(caught.value)


def test_quantization_the_format_of_a_sync_follows_from_the_engines() -> None:
    assert make_config("x").sent_quantization == "int8"
    assert make_config("x", weight_sync={"quantization": "int8"}).sent_quantization == "int8"
    only_sent = make_config("x", inference={"engine": "hf"}, weight_sync={"quantization": "fp8"})
    assert only_sent.sent_quantization == "fp8" and only_sent.inference.quantization == "none"


def test_quantization_needs_an_engine_that_computes_in_8_bits() -> None:
    check_engine("vllm", make_config("x").required_engine_capabilities)
    needs = make_config("x", inference={"engine": "hf", "quantization": "fp8"}).required_engine_capabilities
    with pytest.raises(ConfigError) as caught:
        check_engine("hf", needs)
    assert str(caught.value) == (
        "inference.quantization fp8 requires an engine that can compute in 8 bits (quantized_compute), but "
        "inference.engine is hf (it computes in the model's dtype): set inference.engine to vllm, or set "
        "weight_sync.quantization instead, which only sends weights in 8 bits."
    )
    judge = JudgeConfig(model="x", engine="hf", quantization="fp8")
    with pytest.raises(ConfigError, match=r"judge.quantization fp8 requires .* set judge.quantization to none"):
        check_engine("hf", judge.required_engine_capabilities, "judge.engine")


def test_quantization_of_unsupported_models_is_rejected(tiny_model: Path, tmp_path: Path) -> None:
    check_quantization(make_config(tiny_model), tiny_model)
    check_judge_quantization(JudgeConfig(model=str(tiny_model), quantization="fp8"), tiny_model)
    done = with_settings(tiny_model, tmp_path / "done", quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(ConfigError, match=r"which is already quantized: set weight_sync.quantization instead"):
        check_quantization(make_config(done), done)
    with pytest.raises(ConfigError, match=r"judge.quantization int8 .* which is already quantized: set judge.quant"):
        check_judge_quantization(JudgeConfig(model=str(done), quantization="int8"), done)
    experts = with_settings(tiny_model, tmp_path / "experts", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(ConfigError, match="which is a mixture of experts"):
        check_quantization(make_config(experts), experts)
    single = make_config(tiny_model, model={"path": str(tiny_model), "dtype": "float32"})
    with pytest.raises(ConfigError, match=r"inference.quantization int8 requires model.dtype bfloat16, got float32"):
        check_quantization(single, tiny_model)


def make_supervised(path: Path | str, dtype: str = "bfloat16", max_new_tokens: int = 8, **inference: Any) -> SFTConfig:
    answers = {
        "data": [{"source": "arithmetic", "reward": "math"}],
        "max_new_tokens": max_new_tokens,
        "inference": {"engine": "vllm", "quantization": "int8"} | inference,
    }
    settings = {
        "name": "x",
        "model": {"path": str(path), "dtype": dtype},
        "data": [{"source": "arithmetic"}],
        "evaluation": {"answers": answers},
    }
    return SFTConfig.model_validate(settings)


def test_quantization_of_engines_that_answer_in_a_supervised_run_is_checked_before_the_trainer_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A supervised run has no section `weight_sync` or `inference`, so messages name other keys."""
    none = "set evaluation.answers.inference.quantization to none"
    prepare_supervised(make_supervised(tiny_model), "supervised")
    with pytest.raises(ConfigError) as caught:
        prepare_supervised(make_supervised(tiny_model, dtype="float32"), "supervised")
    assert str(caught.value) == (
        f"evaluation.answers.inference.quantization int8 requires model.dtype bfloat16, got float32: set it to "
        f"bfloat16, or {none}."
    )
    experts = with_settings(tiny_model, tmp_path / "experts", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(ConfigError, match=rf"int8 is not supported for .*, which is a mixture of experts: {none}\."):
        prepare_supervised(make_supervised(experts), "supervised")
    with pytest.raises(ConfigError) as caught:
        prepare_supervised(make_supervised(tiny_model, engine="hf"), "supervised")
    assert str(caught.value) == (
        "evaluation.answers.inference.quantization int8 requires an engine that can compute in 8 bits "
        "(quantized_compute), but evaluation.answers.inference.engine is hf (it computes in the model's dtype): set "
        f"evaluation.answers.inference.engine to vllm, or {none}."
    )


def test_quantization_of_engines_that_answer_in_a_supervised_run_is_part_of_its_check(tiny_model: Path) -> None:
    pytest.importorskip("vllm")
    report = roll.check(make_supervised(tiny_model))
    assert not report.problems
    assert any(
        "the engines of evaluation.answers compute linear layers in int8 (W8A8)" in each for each in report.notes
    )
    assert not any("W8A8" in each for each in roll.check(make_supervised(tiny_model, quantization="none")).notes)


def test_quantization_a_context_of_answers_without_space_for_prompts_names_the_keys_of_the_supervised_run() -> None:
    with pytest.raises(ValueError) as caught:
        make_supervised("x", max_context=8)
    assert (
        "evaluation.answers.inference.max_context must be > evaluation.answers.max_new_tokens to leave space for "
        "prompts, got 8 and 8: raise evaluation.answers.inference.max_context, or lower "
        "evaluation.answers.max_new_tokens"
    ) in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "note"),
    [
        ({"type": "grpo"}, "corrected by truncated importance sampling (algorithm.correction.upper 2, level token)"),
        ({"type": "cispo"}, "corrected, because algorithm.ratio.against is rollout"),
        ({"type": "grpo", "correction": {"upper": None}}, "is not corrected: set algorithm.correction.upper to 2"),
    ],
)
def test_quantization_is_described_with_the_correction_of_its_mismatch(algorithm: Any, note: str) -> None:
    engines, correction = describe_quantization(make_config("x", algorithm=algorithm))
    assert "int8 (W8A8)" in engines and "warns above 0.1 nats per token (alarms.mismatch_above)" in engines
    assert note in correction
    assert describe_quantization(make_config("x", inference={"engine": "hf"})) == []


@pytest.mark.integration
def test_quantization_is_part_of_the_report_of_a_check(tiny_model: Path) -> None:
    pytest.importorskip("vllm")
    report = roll.check(make_config(tiny_model))
    assert not report.problems
    assert any("W8A8" in note for note in report.notes)
    assert any("linear weights as int8; engines compute in int8" in line for line in report.batch)
    refused = roll.check(make_config(tiny_model, inference={"engine": "hf", "quantization": "int8"}))
    assert any("quantized_compute" in problem for problem in refused.problems)
