"""Biases of what ranks divide: where outputs are summed over them, each rank adds its share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from roll.training.parallel import tensor


def test_tensor_parallel_bias_a_bias_is_added_once_whatever_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, attention_bias=True, mlp_bias=True))
    layer = model.model.layers[0]
    for bias in (layer.mlp.up_proj.bias, layer.mlp.down_proj.bias):
        torch.nn.init.normal_(bias)
    up, down = (getattr(layer.mlp, name).bias.detach().clone() for name in ("up_proj", "down_proj"))
    monkeypatch.setattr(tensor, "reduce_scatter", lambda share, group: share)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        tensor.apply_tensor_parallel(model, model.model, model.lm_head, init_device_mesh("cpu", (2,)))
        found = [getattr(layer.mlp, name)(torch.zeros(1, 3, n)) for name, n in (("up_proj", 16), ("down_proj", 12))]
    finally:
        dist.destroy_process_group()
    assert torch.equal(found[0], up[12:].expand(1, 3, 12))
    torch.testing.assert_close(found[1], (down / 2).expand(1, 3, 16))
