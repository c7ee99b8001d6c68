"""Training steps on a CUDA device without numbers: every operand is on the device, and the host rarely waits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import build_library, run_cases, run_program
from families import FAMILIES, write_model
from worlds.vision_models import write_vision_model

from roll.training import experts

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is needed to compile the fake device")
FULL_KL = {"kl_coefficient": 0.1, "kl_estimator": "full", "entropy_coefficient": 0.01}
RUNS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "adapters": {"dtype": "bfloat16", "lora": {"rank": 2}},
    "checkpointing": {"dtype": "bfloat16", "activation_checkpointing": True},
    "8-bit": {"dtype": "bfloat16", "optimizer": "adamw_8bit"},
}
MORE_RUNS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "offloaded activations": {"dtype": "bfloat16", "offload_activations": True},
    "offloaded optimizer": {"dtype": "bfloat16", "offload_optimizer": True},
    "divergence from the adapters' base": {"dtype": "bfloat16", "lora": {"rank": 2}, "loss": FULL_KL},
    "divergence from a reference": {"dtype": "bfloat16", "holds_reference": True, "loss": FULL_KL},
}
COPIES_OF_MODELS = {"phi-moe": 1}
"""Copies to the device in each forward pass of `transformers`: phi-moe computes RoPE frequencies from a list."""
VISION_FAMILIES = ("gemma3", "internvl", "llava")
"""Families whose tower does not read numbers from the device. Those with images of any shape do, in `transformers`."""
FAST_FAMILIES = ("gemma3", "gpt-oss", "qwen3-moe")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the fake device, compiled once."""
    return build_library(tmp_path_factory.mktemp("fake_cuda"))


@needs_compiler
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("runs", "families", "with_images"),
    [
        (RUNS, FAST_FAMILIES, VISION_FAMILIES[:1]),
        pytest.param(
            MORE_RUNS, sorted(set(FAMILIES) - set(FAST_FAMILIES)), VISION_FAMILIES[1:], marks=pytest.mark.slow
        ),
    ],
    ids=["three", "others"],
)
def test_fake_cuda_training_step_stays_on_its_device(
    tiny_model: Path,
    library: Path,
    tmp_path: Path,
    runs: dict[str, Any],
    families: Sequence[str],
    with_images: Sequence[str],
) -> None:
    cases = {f"llama, {name}": {"model": str(tiny_model), "settings": settings} for name, settings in runs.items()}
    for name in families:
        model = write_model(tmp_path / name, tiny_model, FAMILIES[name])
        cases[name] = {"model": str(model), "settings": {"dtype": "bfloat16"}}
    for name in with_images:
        model = write_vision_model(tmp_path / f"vision-{name}", name)
        settings = {"dtype": "bfloat16", "media_dir": str(tmp_path / f"media-{name}")}
        cases[f"{name} with images"] = {"model": str(model), "settings": settings}
    for name, result in zip(cases, run_cases(library, list(cases.values()), tmp_path), strict=True):
        assert "error" not in result, f"{name}: {result['error']}"
        check_transfers(name, result)


def check_transfers(name: str, result: dict[str, int]) -> None:
    """Check the budget of a step.

    A micro-batch has two copies to the device: the network's inputs and the loss's inputs. Images add two: the inputs
    of the tower, whose shapes are equal in these models, and the places of the features. A step has one read of its
    results, one of the gradient norm, and a wait at its end.
    """
    with_images = "with images" in name
    assert result["micro_batches"] >= (2 if with_images else 3), name
    own = COPIES_OF_MODELS.get(name, 0) * result["micro_batches"]
    if "offloaded" in name:
        assert result["copies to pinned memory"] > 0, name
    else:
        assert result["copies"] - own <= (4 if with_images else 2) * result["micro_batches"], name
    assert result["reads"] == 2, name
    assert result["waits"] == 1, name
    assert result.get("reads elsewhere", 0) == 0, name
    assert result.get("pageable copies", 0) == own, name


@needs_compiler
@pytest.mark.integration
def test_fake_cuda_denoisers_stay_on_their_device(library: Path) -> None:
    """One copy to the device for each forward pass, and one wait for the velocities of each other copy of weights."""
    results = run_program(library, "diffusion")
    assert [result["name"] for result in results] == ["flow_matching", "flow_grpo", "nft", "dpo"]
    for result in results:
        assert result["copies"] == result["passes"], result
        assert result.get("pageable copies", 0) == result.get("reads elsewhere", 0) == 0, result
        assert result["reads"] == 2 and result["waits"] == 1 + result["others"], result


@needs_compiler
def test_fake_cuda_operands_of_two_devices_are_found(library: Path, tmp_path: Path) -> None:
    program = f"""
import ctypes
ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL)
import torch
from fake_cuda import fake_cuda
with fake_cuda() as counts:
    torch.empty(8, device="cuda").cpu()
    torch.empty(8).to("cuda")
    print(dict(counts))
    torch.empty(8, device="cuda") + torch.empty(8)
"""
    command = [sys.executable, "-c", program]
    path = str(Path(__file__).parent)
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "{'reads elsewhere': 1, 'copies': 1, 'pageable copies': 1}" in done.stdout
    assert "two different devices" in done.stderr or "on the same device" in done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("inner", "outer"), [(16, 24), (16, 20), (12, 16), (4, 4), (10, 16)])
def test_fake_cuda_experts_use_the_grouped_kernel_where_it_takes_their_shapes(
    dtype: torch.dtype, inner: int, outer: int
) -> None:
    """The checks of the kernel's meta form say so. They are for bfloat16, and about bytes: rows of as many."""
    weight = torch.empty(2, outer, inner, dtype=dtype, device="meta")
    outer, inner = (width * weight.element_size() // 2 for width in (outer, inner))
    alike, offsets = meta(2, outer, inner), torch.empty(2, dtype=torch.int32, device="meta")
    try:
        torch._grouped_mm(meta(6, inner), alike.transpose(1, 2), offs=offsets)
        torch._grouped_mm(meta(6, outer), alike, offs=offsets)  # as the backward pass does
        takes = True
    except RuntimeError:
        takes = False
    assert experts._has_kernel(weight) == takes


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")
