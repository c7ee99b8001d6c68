"""Adapters beside peft's own: the same names, outputs, gradients and merged weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from roll.config.model import LoRAConfig
from roll.training.network.lora import add_adapters, disable_adapters, find_adapters

PREFIX = "base_model.model."


def qwen3() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, vocab_size=64, num_attention_heads=4, num_key_value_heads=2))


def gpt2() -> Any:
    """Keeps its weights as [inputs, outputs]."""
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(("make", "targets"), [(qwen3, "all-linear"), (gpt2, ["c_attn", "c_fc"])])
def test_lora_adapters_equal_peft(make: Any, targets: Any) -> None:
    torch.manual_seed(0)
    base = make().double().eval()
    model, other = copy.deepcopy(base), copy.deepcopy(base)
    add_adapters(model, LoRAConfig(rank=4, alpha=10, target_modules=targets), seed=3)
    theirs: Any = get_peft_model(other, LoraConfig(r=4, lora_alpha=10, target_modules=targets)).eval()
    own, expected = dict(model.named_parameters()), dict(theirs.named_parameters())
    assert {PREFIX + name for name, p in own.items() if p.requires_grad} == {
        name for name, p in expected.items() if p.requires_grad
    }
    with torch.no_grad():
        for name, parameter in own.items():
            if "lora_B" in name:
                assert not parameter.any()
                parameter.normal_()
            expected[PREFIX + name].copy_(parameter)
    ids = torch.randint(64, (2, 9))
    results = [each(input_ids=ids).logits for each in (model, theirs)]
    assert torch.equal(*results)
    for result in results:
        result.square().sum().backward()
    assert all(torch.equal(p.grad, expected[PREFIX + n].grad) for n, p in own.items() if p.requires_grad)
    with disable_adapters(model):
        assert torch.equal(model(input_ids=ids).logits, base(input_ids=ids).logits)
    assert torch.equal(model(input_ids=ids).logits, results[0])
    merged, plain = theirs.merge_and_unload().state_dict(), base.state_dict()
    adapters = find_adapters(model)
    assert len(adapters) == (14 if make is qwen3 else 4)
    for name, adapter in adapters.items():
        torch.testing.assert_close(adapter.merge(plain[name], own[adapter.a], own[adapter.b]), merged[name])
