"""HF weights into Megatron's fused ones and back, without Megatron."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll.errors import ModelError
from roll.training.megatron.weight_mapping import Shards, locate_weights

QUERIES, KEYS, WIDTH, HIDDEN, INNER = 4, 2, 3, 5, 8
CONFIG = SimpleNamespace(
    model_type="qwen2", num_attention_heads=QUERIES, num_key_value_heads=KEYS, head_dim=WIDTH, hidden_size=HIDDEN
)
LAYER = "model.layers.7."


def rank(number: int, size: int) -> Any:
    """A group of ranks that is only asked who is in it."""
    return SimpleNamespace(rank=lambda: number, size=lambda: size)


def test_megatron_names_qkv_is_fused_by_key_value_head() -> None:
    heads = {"q": QUERIES, "k": KEYS, "v": KEYS}
    weights = {
        f"{LAYER}self_attn.{part}_proj.bias": torch.arange(count * WIDTH) + 100 * number
        for number, (part, count) in enumerate(heads.items())
    }
    places = locate_weights(list(weights), CONFIG)
    assert {place.parameter for place in places.values()} == {"model.layers.7.inside.self_attention.linear_qkv.bias"}
    fused = torch.full(((QUERIES + 2 * KEYS) * WIDTH,), -1)
    for name, place in places.items():
        place.write(fused, weights[name], None)
    first = [*range(0, 6), 100, 101, 102, 200, 201, 202]  # two queries' entries, their key's, their value's
    second = [*range(6, 12), 103, 104, 105, 203, 204, 205]
    assert fused.tolist() == first + second
    own = torch.full((len(fused) // 2,), -1)
    for name, place in places.items():
        place.write(own, weights[name], rank(1, 2))
    assert own.tolist() == second
    for name, place in places.items():
        assert place.read(fused).tolist() == weights[name].tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_megatron_names_every_weight_of_a_layer_round_trips(size: int) -> None:
    shapes = {
        "self_attn.q_proj.weight": (QUERIES * WIDTH, HIDDEN),
        "self_attn.k_proj.weight": (KEYS * WIDTH, HIDDEN),
        "self_attn.v_proj.weight": (KEYS * WIDTH, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, QUERIES * WIDTH),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
    }
    fused = {
        "self_attention.linear_qkv.weight": ((QUERIES + 2 * KEYS) * WIDTH // size, HIDDEN),
        "self_attention.linear_proj.weight": (HIDDEN, QUERIES * WIDTH // size),
        "mlp.linear_fc1.weight": (2 * INNER // size, HIDDEN),
        "mlp.linear_fc2.weight": (HIDDEN, INNER // size),
        "input_layernorm.weight": (HIDDEN,),
    }
    torch.manual_seed(0)
    weights = {LAYER + name: torch.randn(shape) for name, shape in shapes.items()}
    places = locate_weights(list(weights), CONFIG)
    slices: dict[str, list[torch.Tensor]] = {name: [] for name in weights}
    for number in range(size):
        own = {f"model.layers.7.inside.{name}": torch.full(shape, torch.nan) for name, shape in fused.items()}
        for name, place in places.items():
            place.write(own[place.parameter], weights[name], rank(number, size) if size > 1 else None)
        assert not any(tensor.isnan().any() for tensor in own.values())
        for name, place in places.items():
            slices[name].append(place.read(own[place.parameter]))
    for name, parts in slices.items():
        dim = places[name].dim
        whole = parts[0] if dim is None else torch.cat(parts, dim)
        assert torch.equal(whole, weights[name]), name


def test_megatron_names_unknown_weights_are_rejected() -> None:
    with pytest.raises(
        ModelError, match=r"supports the model families llama, .*this model is 'gemma3': set training.backend"
    ):
        locate_weights([], SimpleNamespace(model_type="gemma3"))
    with pytest.raises(
        ModelError, match=r"does not support 1 weights of the model type 'qwen2', for example '.*self_attn.sinks'"
    ):
        locate_weights(["lm_head.weight", LAYER + "self_attn.sinks"], CONFIG)
    with pytest.raises(ModelError, match=r"does not support 1 weights"):
        locate_weights([LAYER + "mlp.up_proj.bias"], CONFIG)


def test_megatron_names_adapters_are_sharded_along_sharded_inputs_or_outputs() -> None:
    names = [
        f"{LAYER}{layer}.lora_{matrix}.default.weight"
        for layer in ("self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
        for matrix in "AB"
    ]
    places = locate_weights([*names, f"{LAYER}self_attn.k_proj.base_layer.bias"], CONFIG)
    found = {place.parameter.removeprefix("model.layers.7.inside."): place.dim for place in places.values()}
    assert found == {
        "self_attention.linear_qkv.adapters.k.lora_A": None,
        "self_attention.linear_qkv.adapters.k.lora_B": 0,
        "self_attention.linear_proj.adapters.whole.lora_A": 1,
        "self_attention.linear_proj.adapters.whole.lora_B": None,
        "mlp.linear_fc1.adapters.gate.lora_A": None,
        "mlp.linear_fc1.adapters.gate.lora_B": 0,
        "mlp.linear_fc2.adapters.whole.lora_A": 1,
        "mlp.linear_fc2.adapters.whole.lora_B": None,
        "self_attention.linear_qkv.bias": 0,
    }


def test_megatron_names_experts_are_sharded_over_ep() -> None:
    names = [f"{LAYER}mlp.{name}" for name in ("gate.weight", "experts.down_proj", "shared_expert.up_proj.weight")]
    router, experts, shared = locate_weights(
        names, SimpleNamespace(**vars(CONFIG) | {"model_type": "qwen2_moe"})
    ).values()
    assert [
        place.parameter.removeprefix("model.layers.7.inside.mlp.block.") for place in (router, experts, shared)
    ] == [
        "gate.weight",
        "experts.down_proj",
        "shared_expert.up_proj.weight",
    ]
    tp, ep = rank(1, 2), rank(2, 3)
    shards = Shards(tp=tp, ep=ep)
    assert [shards.get_ranks(place) for place in (router, experts, shared)] == [None, ep, None]
    own = torch.zeros(2, 4, 5)
    experts.write(own, torch.arange(6.0)[:, None, None].expand(6, 4, 5), ep)
    assert own[:, 0, 0].tolist() == [4, 5]
