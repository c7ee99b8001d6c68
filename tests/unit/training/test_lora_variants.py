"""Variants of LoRA in a whole trainer, beside peft and torch's AdamW: updates, merged weights and exported adapters."""

from __future__ import annotations

import dataclasses
import errno
import json
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from peft.utils.other import get_pattern_key
from training_helpers import logprobs_of, make_batch, make_spec, reference_logprobs
from transformers import AutoModelForCausalLM

from roll.algorithms.losses import LikelihoodLoss
from roll.config.load import load_config
from roll.config.model import LoRAConfig
from roll.errors import ConfigError, ModelError
from roll.training import TorchBackend
from roll.training.checkpoint.export import write_adapter

RATE = 1e-2
VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2, "layers.0.mlp.down_proj": 8}, "alpha_pattern": {"v_proj": 3.0}},
    "lora+": {"loraplus_lr_ratio": 16.0},
    "together": {"use_rslora": True, "use_dora": True, "rank_pattern": {"q_proj": 2}, "loraplus_lr_ratio": 4.0},
}


def load_peft(base: Path, settings: Mapping[str, Any]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
    own = {name: value for name, value in settings.items() if name != "loraplus_lr_ratio"}
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", **own))  # type: ignore[arg-type]


def compute_loss(model: Any, batch: Any) -> torch.Tensor:
    logprobs = reference_logprobs(model, batch)
    masks = [torch.from_numpy(sample.loss_mask) for sample in batch.samples]
    chosen = torch.cat([values[mask] for values, mask in zip(logprobs, masks, strict=True)])
    return -chosen.mean()


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_lora_variant_updates_merges_and_exports_equal_peft(variant: str, tiny_model: Path, tmp_path: Path) -> None:
    settings, prefix = VARIANTS[variant], "base_model.model."
    lora = LoRAConfig(rank=4, alpha=6.0, **settings)
    backend = TorchBackend(make_spec(tiny_model, lora=lora, learning_rate=RATE, weight_decay=0.0, epsilon=0.1))
    theirs = load_peft(tiny_model, settings)
    weights = dict(theirs.named_parameters())
    own = {name: p for name, p in backend.model.named_parameters() if p.requires_grad}
    assert {prefix + name for name in own} == {name for name, p in weights.items() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in own.items():
            weights[prefix + name].copy_(parameter)
    optimizer = create_loraplus_optimizer(
        theirs,
        torch.optim.AdamW,  # type: ignore[arg-type]
        lr=RATE,
        loraplus_lr_ratio=lora.loraplus_lr_ratio,
        betas=(backend.spec.training.beta1, backend.spec.training.beta2),
        eps=0.1,
    )
    for seed in range(3):
        batch = make_batch(seed)
        backend.train_step(batch, LikelihoodLoss())
        optimizer.zero_grad()
        compute_loss(theirs, batch).backward()
        optimizer.step()
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.detach(), weights[prefix + name].detach(), atol=1e-6, rtol=1e-6)
    batch = make_batch(7)
    trained = logprobs_of(backend, batch)
    assert any(
        abs(a - b).max() > 1e-3 for a, b in zip(trained, logprobs_of(backend, batch, adapter=False), strict=True)
    )
    backend.export(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    loaded: Any = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    with torch.inference_mode():
        for model in (loaded, merged):
            for expected, found in zip(trained, reference_logprobs(model, batch), strict=True):
                torch.testing.assert_close(torch.as_tensor(expected), found, atol=1e-5, rtol=0)
    exported = theirs.merge_and_unload().state_dict()
    for name, tensor in backend.weights():
        torch.testing.assert_close(tensor.detach(), exported[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "run", "model", "owner/model"])
def test_lora_variant_exported_adapter_names_a_base_model_that_peft_loads(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of the catalog, a run, and a relative path are none for peft; ROLL has resolved them to a directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "model").symlink_to(tiny_model)
    spec = make_spec(tiny_model, lora=LoRAConfig(rank=4), learning_rate=RATE)
    backend = TorchBackend(dataclasses.replace(spec, model=spec.model.model_copy(update={"path": name})))
    backend.train_step(make_batch(1), LikelihoodLoss())
    backend.export(tmp_path / "out" / "model")
    adapter, batch = tmp_path / "out" / "adapter", make_batch(2)
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == (name if name == "owner/model" else str(tiny_model))
    if name != "owner/model":
        monkeypatch.chdir("/")
        loaded = AutoPeftModelForCausalLM.from_pretrained(adapter, attn_implementation="eager").eval()
        with torch.inference_mode():
            found = reference_logprobs(loaded, batch)
        for expected, values in zip(logprobs_of(backend, batch), found, strict=True):
            torch.testing.assert_close(torch.as_tensor(expected), values, atol=1e-5, rtol=0)


def test_lora_variant_dora_starts_with_the_unchanged_model(tiny_model: Path) -> None:
    for settings in ({"dtype": "bfloat16"}, {"lora": {"base": "nf4"}}):
        lora = LoRAConfig(rank=4, use_dora=True, **settings.pop("lora", {}))
        backend = TorchBackend(make_spec(tiny_model, lora=lora, **settings))  # type: ignore[arg-type]
        batch = make_batch(1)
        for adapted, base in zip(logprobs_of(backend, batch), logprobs_of(backend, batch, adapter=False), strict=True):
            assert (adapted == base).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank_pattern": {"q_prj": 2}}, r"rank_pattern has 'q_prj'.*Did you mean 'q_proj'\?"),
        ({"alpha_pattern": {"lm_head": 2.0}}, "alpha_pattern has 'lm_head', which matches no layer with an adapter"),
        ({"rank_pattern": {"q_proj": 10**6}}, r"model\.lora\.rank_pattern must be <= "),
    ],
)
def test_lora_variant_patterns_without_a_layer_are_rejected(
    settings: dict[str, Any], message: str, tiny_model: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        TorchBackend(make_spec(tiny_model, lora=LoRAConfig(**settings)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.lora.use_dora=true", "training.backend=deepspeed"], "use_dora requires whole rows"),
        (["model.lora.use_dora=true", "training.backend=megatron"], "use_dora requires whole rows"),
        (["model.lora.base=nf4", "training.backend=megatron"], "4-bit weights cannot be sharded"),
        (["model.lora.rank_pattern={'q_proj(': 4}"], "is not a regular expression"),
        (["model.lora.loraplus_lr_ratio=0"], "loraplus_lr_ratio"),
    ],
)
def test_lora_variant_unsupported_settings_are_rejected(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Path(__file__).parents[3] / "examples" / "quickstart.yaml", overrides)


def test_lora_variant_scales_and_ranks_follow_the_patterns() -> None:
    lora = LoRAConfig(
        rank=4, alpha=8.0, rank_pattern={"layers.1.*q_proj": 16, "q_proj": 2}, alpha_pattern={"v_proj": 1}
    )
    names = ("model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj")
    assert [lora.get_rank(name) for name in names] == [16, 2, 4]
    assert [lora.compute_scale(name) for name in names] == [8 / 16, 8 / 2, 1 / 4]
    assert lora.max_rank == 16
    assert lora.model_copy(update={"use_rslora": True}).compute_scale(names[0]) == 8 / 4


@pytest.mark.parametrize(
    "pattern",
    ["q_proj", "proj", "_proj", "layers.1", "layers.1.*", "self_attn.q_proj", ".*", "(q|k)_proj", "q_proj|v_proj", "q"],
)
def test_lora_variant_patterns_match_the_layers_that_peft_matches(pattern: str) -> None:
    lora = LoRAConfig(rank=4, rank_pattern={pattern: 2})
    layers = [
        f"model.layers.{number}.{inside}"
        for number in (0, 1, 11)
        for inside in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
    ]
    expected = [2 if get_pattern_key([pattern], layer) == pattern else 4 for layer in layers]
    assert [lora.get_rank(layer) for layer in layers] == expected


def test_lora_variant_export_to_a_full_disk_raises_an_os_error(tmp_path: Path) -> None:
    tensors = {f"base_model.model.a.lora_{part}.weight": torch.zeros(64, 64) for part in "AB"}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, hard))  # smaller than the tensors, larger than the settings
    try:
        with pytest.raises(OSError) as failed:
            write_adapter(tmp_path / "adapter", tensors, LoRAConfig(rank=64), "base", ["a"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failed.value.errno == errno.EFBIG
    assert not (tmp_path / "adapter").exists()
