"""Weight syncs of adapters: what is refused before a run, and the size of a sync."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "training"))
from families import FAMILIES, write_model

from roll.config.adapter_parameters import count_lora_parameters
from roll.config.engines import LazyEngine, check_engine, get_engine_capabilities
from roll.config.estimate import estimate_sync_bytes
from roll.config.load import load_config
from roll.config.model import LoRAConfig
from roll.errors import ConfigError
from roll.pipelines.preparation import check_adapter_sync

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
ADAPTER = ["weight_sync.lora=adapter", "model.lora.rank=8"]
SMOLLM2: Any = SimpleNamespace(
    num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536,
    experts_per_token=0, num_parameters=134_515_008,
)  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weight_sync.lora=adapter"], "weight_sync.lora is 'adapter', but no adapter is trained: set model.lora"),
        ([*ADAPTER, "model.lora.base=nf4"], "engines do not have the frozen weights of model.lora.base 'nf4'"),
        ([*ADAPTER, "inference.quantization=int8"], r"inference.quantization \(int8\) requires that all"),
        ([*ADAPTER, "weight_sync.quantization=fp8"], r"weight_sync.quantization \(fp8\) requires that all"),
    ],
)
def test_config_adapter_sync_conflicting_settings_are_rejected(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(QUICKSTART, overrides)
    assert "set weight_sync.lora to merged" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        ([*ADAPTER, "model.lora.use_dora=true"], r"generate with DoRA adapters \(dora\), but inference.engine is vllm"),
        (ADAPTER, None),
    ],
)
def test_config_adapter_sync_requires_an_engine_with_adapters(overrides: list[str], missing: str | None) -> None:
    config = load_config(QUICKSTART, overrides)
    if missing is None:
        check_engine("vllm", config.required_engine_capabilities)
    else:
        with pytest.raises(ConfigError, match=missing):
            check_engine("vllm", config.required_engine_capabilities)
    check_engine("hf", config.required_engine_capabilities)


def test_config_adapter_sync_of_rank_8_sends_less_than_2_percent_of_smollm2() -> None:
    config = load_config(QUICKSTART, ADAPTER)
    # q and o: 8 x (576 + 576); k and v: 8 x (576 + 192); gate, up and down: 8 x (576 + 1536)
    count = 30 * 8 * (2 * 1152 + 2 * 768 + 3 * 2112)
    assert count_lora_parameters(SMOLLM2, LoRAConfig(rank=8)) == count == 2_442_240
    sent = estimate_sync_bytes("none", SMOLLM2, 2, config.synced_adapter)
    assert sent == 2 * count
    assert sent <= 0.02 * estimate_sync_bytes("none", SMOLLM2, 2)


def test_config_adapter_parameters_follow_the_patterns_and_count_the_norms_of_dora() -> None:
    lora = LoRAConfig(rank=8, rank_pattern={"layers.0.mlp.down_proj": 16}, use_dora=True)
    outputs = 576 + 2 * 192 + 576 + 2 * 1536 + 576
    assert count_lora_parameters(SMOLLM2, lora) == 2_442_240 + 8 * 2112 + 30 * outputs


@pytest.mark.parametrize(
    ("family", "engine", "message"),
    [
        ("qwen3-moe", "vllm", r"which has experts, requires an engine .*\(moe_lora\).*set inference.engine to hf"),
        ("qwen3-moe", "hf", None),
        ("qwen3", "vllm", None),
    ],
)
def test_config_adapter_sync_unsupported_models_are_rejected(
    family: str, engine: str, message: str | None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU, whatever build of vLLM is installed."""
    without = dataclasses.replace(get_engine_capabilities("vllm"), moe_lora=False)
    monkeypatch.setattr("roll.inference.vllm.description.VLLM_ENGINE", LazyEngine(path="", capabilities=without))
    path = write_model(tmp_path / "model", tiny_model, FAMILIES[family])
    config = load_config(QUICKSTART, [*ADAPTER, f"inference.engine={engine}"])
    if message is None:
        check_adapter_sync(config, path)
    else:
        with pytest.raises(ConfigError, match=message):
            check_adapter_sync(config, path)
