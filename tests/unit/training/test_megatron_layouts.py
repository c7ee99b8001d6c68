"""Megatron's layouts of adapters, context and experts: each trains as `torch` does, saves, resumes and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import EXPERTS, FAMILIES, Family, write_model
from megatron_courses import VARIANTS, Course, refuse_idle_stage, run_courses
from worlds.ranks import run_ranks

pytest.importorskip("megatron.core", reason="Megatron is not installed: make setup MEGATRON=yes")

pytestmark = pytest.mark.slow
QWEN2_MOE = Family(config="Qwen2Moe", settings=EXPERTS | {"shared_expert_intermediate_size": 16}, moe=True)


@pytest.mark.parametrize(
    ("num_ranks", "sizes"),
    [(1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (4, {"tp": 2}), (4, {"tp": 2, "pp": 2})],
    ids=["one rank", "tp", "pp", "data x tp", "tp x pp"],
)
def test_megatron_lora_trains_saves_resumes_and_exports_as_torch(
    num_ranks: int, sizes: dict[str, int], tiny_model: Path, tmp_path: Path
) -> None:
    """Biases of queries, norms of queries and keys, tied embeddings or not, patterns of ranks and scales."""
    models = {family: write_model(tmp_path / family, tiny_model, FAMILIES[family]) for family in ("qwen2", "qwen3")}
    courses = {
        f"{family}, {name}": Course(model=models[family], sizes=sizes, lora=lora)
        for family, (name, lora) in zip(("qwen2", "qwen3", "qwen2"), VARIANTS.items(), strict=True)
    }
    recomputed = Course(
        model=models["qwen3"],
        sizes=sizes,
        lora=VARIANTS["few layers"],
        training={"activation_checkpointing": True},
    )
    run_ranks(run_courses, (tmp_path, courses | {"recomputed": recomputed}, num_ranks), num_ranks)


def test_megatron_lora_stage_without_adapters_is_rejected(tiny_model: Path, tmp_path: Path) -> None:
    run_ranks(refuse_idle_stage, (tmp_path, tiny_model), 2)


@pytest.mark.parametrize(
    ("num_ranks", "sizes"),
    [(2, {"cp": 2}), (4, {"tp": 2, "cp": 2}), (4, {"pp": 2, "cp": 2}), (4, {"cp": 4})],
    ids=["cp", "tp x cp", "pp x cp", "more ranks than key-value heads"],
)
def test_megatron_context_parallel_trains_saves_resumes_and_exports_as_torch(
    num_ranks: int, sizes: dict[str, int], tiny_model: Path, tmp_path: Path
) -> None:
    """Scaled rotary positions, sliding windows, norms of queries and keys, and adapters."""
    models = {name: write_model(tmp_path / name, tiny_model, FAMILIES[name]) for name in ("llama3", "mistral", "qwen3")}
    courses = {name: Course(model=model, sizes=sizes) for name, model in models.items()}
    courses["adapters"] = Course(model=models["qwen3"], sizes=sizes, lora=VARIANTS["patterns and LoRA+"])
    run_ranks(run_courses, (tmp_path, courses, num_ranks), num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "sizes"),
    [
        (1, {}),
        (2, {"ep": 2}),
        (2, {"tp": 2, "ep": 2}),
        (4, {"ep": 2}),
        (4, {"pp": 2, "ep": 2}),
        (4, {"cp": 2, "ep": 4}),
    ],
    ids=["one rank", "ep", "ep over tp", "data x ep", "pp x ep", "ep over data and cp"],
)
def test_megatron_experts_train_save_resume_and_export_as_torch(
    num_ranks: int, sizes: dict[str, int], tiny_model: Path, tmp_path: Path
) -> None:
    """Routers with and without normalized weights, shared experts, a dense layer, balanced loads, replayed experts."""
    families = {
        "qwen3-moe": FAMILIES["qwen3-moe"],
        "mixtral": FAMILIES["mixtral"],
        "qwen2-moe": QWEN2_MOE,
    }
    models = {name: write_model(tmp_path / name, tiny_model, family) for name, family in families.items()}
    dense = write_model(tmp_path / "dense", tiny_model, FAMILIES["qwen3-moe"], mlp_only_layers=[0])
    courses = {
        "qwen3-moe": Course(model=models["qwen3-moe"], sizes=sizes, is_skewed=True, training={"router_aux_loss": 0.3}),
        "mixtral": Course(model=models["mixtral"], sizes=sizes, training={"activation_checkpointing": True}),
        "qwen2-moe": Course(model=models["qwen2-moe"], sizes=sizes, is_skewed=True),
        "a dense layer": Course(model=dense, sizes=sizes),
        "adapters": Course(model=models["qwen2-moe"], sizes=sizes, lora=VARIANTS["rslora"]),
    }
    run_ranks(run_courses, (tmp_path, courses, num_ranks), num_ranks)
