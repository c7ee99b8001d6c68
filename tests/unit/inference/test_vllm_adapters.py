"""The parts of vLLM's adapters that need no engine: arguments, names, versions and grouped products."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "training"))
from families import FAMILIES, write_model

from roll.config.model import LoRAConfig
from roll.errors import DataError, ModelError, UnsupportedError, WeightSyncError
from roll.inference import EngineSpec
from roll.inference.vllm.adapters import EngineAdapters, build_lora_arguments
from roll.inference.vllm.lora_kernels import add_products, group_tokens
from roll.types import WeightUpdate

LORA = LoRAConfig(rank=9, rank_pattern={"v_proj": 20})


def spec_of(model: Path, lora: LoRAConfig | None = LORA, **changes: Any) -> EngineSpec:
    return EngineSpec(engine_id="e0", kind="vllm", model_path=str(model), max_context=64, lora=lora, **changes)


def test_vllm_adapter_arguments_reserve_a_slot_and_exclude_the_output_layer(tiny_model: Path) -> None:
    found = build_lora_arguments(spec_of(tiny_model, max_adapters=3), cpu=True)
    assert (found["enable_lora"], found["max_loras"], found["max_cpu_loras"], found["max_lora_rank"]) == (
        True,
        4,
        4,
        32,
    )
    layers = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert found["lora_target_modules"] == layers
    some = build_lora_arguments(spec_of(tiny_model, LoRAConfig(rank=8, target_modules=["q_proj", "lm_head"])), cpu=True)
    assert (some["lora_target_modules"], some["max_lora_rank"]) == (["q_proj"], 8)
    assert build_lora_arguments(spec_of(tiny_model, None), cpu=True) == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "vLLM does not support DoRA"),
        ({"rank": 600}, "up to rank 512, but model.lora has rank 600"),
    ],
)
def test_vllm_adapter_arguments_reject_unsupported_adapters(
    settings: dict[str, Any], message: str, tiny_model: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        build_lora_arguments(spec_of(tiny_model, LoRAConfig(**settings)), cpu=True)


def test_vllm_adapter_arguments_reject_experts_on_cpu(tiny_model: Path, tmp_path: Path) -> None:
    """With adapters, vLLM computes them with Triton."""
    spec = spec_of(write_model(tmp_path / "mixture", tiny_model, FAMILIES["qwen3-moe"]))
    with pytest.raises(ModelError, match="which has experts, are not supported by vLLM on a CPU"):
        build_lora_arguments(spec, cpu=True)
    on_gpu = build_lora_arguments(spec, cpu=False)
    assert on_gpu["lora_target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_vllm_adapter_names_keep_their_numbers_and_have_their_own_versions(tiny_model: Path) -> None:
    adapters = EngineAdapters(spec_of(tiny_model, max_adapters=2))
    assert adapters.build_request(None) is None
    updates = [("x", 5), ("y", 1), ("x", 6)]
    seen = []
    for name, version in updates:
        target = adapters.build_target(name)
        assert target is not None and len(target.layers) == 14
        update = WeightUpdate(policy_version=version, manifest=(), transport="", handle=None, adapter=name)
        seen.append((target.number, adapters.confirm_update(update, target)))
    assert [number for number, _ in seen] == [1, 2, 1]
    versions = [[adapters.get_version(name, vllm) for name in ("x", "y", None)] for _, vllm in seen]
    assert versions == [[5, 0, 0], [5, 1, 0], [6, 1, 0]]
    with pytest.raises(WeightSyncError, match="'z' cannot be added: the engine has 2 adapters"):
        adapters.build_target("z")
    with pytest.raises(DataError, match="names the adapter 'z', which the engine has not received"):
        adapters.build_request("z")


def test_vllm_adapter_names_are_refused_by_an_engine_without_adapters(tiny_model: Path) -> None:
    adapters = EngineAdapters(spec_of(tiny_model, None))
    for call in (adapters.build_target, adapters.build_request):
        assert call(None) is None
        with pytest.raises(UnsupportedError, match="the vllm engine has no LoRA adapters, got adapter 'x'"):
            call("x")


@pytest.mark.parametrize("slots", [[1, 1, 1, 1], [0, -1, 1, 0], [-1, -1, -1, -1], [2, 2, -1, -1]])
def test_vllm_adapter_products_equal_those_of_single_tokens(slots: list[int]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 6), torch.randn(4, 5)
    a = tuple(torch.randn(3, 1, 2, 6) for _ in range(2))
    b = tuple(torch.randn(3, 1, width, 2) for width in (3, 2))
    expected = y.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[token] += torch.cat([b[part][slot, 0] @ a[part][slot, 0] @ x[token] for part in range(2)])
    found = y.clone()
    add_products(found, x, group_tokens(torch.tensor(slots)), a, b, (3, 2))
    torch.testing.assert_close(found, expected)
    untouched = [token for token, slot in enumerate(slots) if slot < 0]
    assert torch.equal(found[untouched], y[untouched])
