"""Starts the real server of SGLang on a CPU."""

from __future__ import annotations

from pathlib import Path

from worlds.extras import extra_python

__all__ = ["CPU_OPTIONS", "write_sglang_python"]

CPU_OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "max_total_tokens": 4096,
    "disable_overlap_schedule": True,
}
"""`inference.options` of a server that computes with SGLang's own PyTorch code."""


def write_sglang_python(directory: Path) -> Path:
    """Write a program that runs the Python of the environment `sglang` with the package that stands for its kernels."""
    kernels = Path(__file__).parents[1] / "extras" / "sglang"
    python = extra_python("sglang")
    program = directory / "python"
    program.write_text(f'#!/bin/sh\nexport PYTHONPATH={kernels} SGLANG_USE_CPU_ENGINE=1\nexec {python} "$@"\n')
    program.chmod(0o755)
    return program
