"""What a teacher said once, kept on disk, teaches what it teaches live; beside plain loops in float64."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from worlds.tiny_model import VOCAB_SIZE, write_tiny_model

from roll.config.pipelines.distill_offline import DistillOfflineConfig
from roll.errors import ConfigError, ModelError
from roll.pipelines.distill_offline.losses import build_offline_loss
from roll.pipelines.distill_offline.paths import resolve_offline_teachers
from roll.pipelines.distill_offline.teachers import TeacherOutputs, compute_teacher_outputs
from roll.pipelines.supervised.preparation import PreparedRun, build_policy_spec, prepare
from roll.training import TorchBackend
from roll.training.precision import Precision
from roll.types import TrainingBatch

DOUBLE = Precision(compute=torch.float64, master=torch.float64)
WORDS = ("ab", "ba", "cab", "abc", "bac", "aab")


@pytest.fixture(scope="module", name="teachers")
def _teachers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("teachers")
    return [write_tiny_model(directory / "a", seed=7, layers=3), write_tiny_model(directory / "b", seed=8, layers=1)]


def config(directory: Path, student: Path, teacher: Any, /, **distillation: Any) -> DistillOfflineConfig:
    data = []
    for domain, words in (("short", WORDS[:3]), ("long", WORDS[3:])):
        path = directory / f"{domain}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"Say {w}.", "completion": w}) + "\n" for w in words))
        data.append({"source": "file", "path": str(path), "domain": domain, "held_out": 0.0})
    return DistillOfflineConfig.model_validate({
        "name": "run",
        "model": {"path": str(student), "dtype": "float32"},
        "teacher": teacher,
        "data": data,
        "distillation": distillation,
        "training": {"examples_per_step": 6, "num_threads": 1},
    })  # fmt: skip


class DoubleTeachers:
    """Starts trainers in float64, and counts them."""

    def __init__(self) -> None:
        self.started: list[str] = []

    async def start_trainer(self, spec: Any, role: str) -> Any:
        self.started.append(spec.model_path)
        backend = TorchBackend(spec, precision=DOUBLE)

        class Group:
            async def forward(self, *args: Any, **kwargs: Any) -> Any:
                return backend.forward(*args, **kwargs)

            async def close(self) -> None:
                backend.close()

        return Group()


def everything(prepared: PreparedRun) -> TrainingBatch:
    draws = prepared.examples.train.draw(len(WORDS))
    return TrainingBatch(samples=tuple(s for draw in draws for s in prepared.examples.build_samples(draw)))  # type: ignore[arg-type]


def ask(
    settings: DistillOfflineConfig, prepared: PreparedRun, batch: TrainingBatch, cluster: Any = None
) -> tuple[TeacherOutputs, TrainingBatch]:
    paths = resolve_offline_teachers(settings, prepared.model_path)
    cluster = cluster or DoubleTeachers()
    taught = asyncio.run(compute_teacher_outputs(settings, prepared, cluster, paths, batch.samples))
    return taught, asyncio.run(taught.add_teacher_columns(batch))


def dense_table(path: Path, tokens: np.ndarray) -> torch.Tensor:
    """[L - 1, V] log-probs by transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1], -1)


def by_hand(student: Path, teacher_by_domain: dict[str, Path], batch: TrainingBatch, k: int, weight: float) -> float:
    """The loss in plain float64: a bucket for all but the k likeliest."""
    terms = []
    for sample in batch.samples:
        at = np.flatnonzero(sample.loss_mask) - 1
        p = dense_table(student, sample.token_ids)[at]
        q = dense_table(teacher_by_domain[sample.domain], sample.token_ids)[at]
        for place, row_p, row_q in zip(at, p.numpy(), q.numpy(), strict=True):
            top = np.argsort(row_q)[::-1][:k]
            pairs = [(np.exp(row_q[i]), np.exp(row_p[i])) for i in top]
            rest = [(1 - sum(side), 1) for side in zip(*pairs, strict=True)]
            pairs += [(rest[0][0], rest[1][0])] if k < VOCAB_SIZE else []
            divergence = sum(y * np.log(y / x) for y, x in pairs)
            terms.append(weight * divergence - (1 - weight) * row_p[sample.token_ids[place + 1]])
    return float(np.mean(terms))


@pytest.mark.parametrize(("k", "weight"), [(1, 1.0), (8, 0.7), (VOCAB_SIZE, 1.0)])
def test_distill_offline_kept_tokens_of_several_teachers_give_the_loss_of_plain_loops(
    tmp_path: Path, tiny_model: Path, teachers: list[Path], k: int, weight: float
) -> None:
    who = [{"model": str(teachers[1]), "domains": ["long"]}, str(teachers[0])]
    settings = config(tmp_path, tiny_model, who, top_k=k, weight=weight, directory=str(tmp_path / "kept"))
    prepared = prepare(settings, "supervised")
    batch = everything(prepared)
    cluster = DoubleTeachers()
    _, completed = ask(settings, prepared, batch, cluster)
    assert cluster.started == [str(teachers[1]), str(teachers[0])]
    student = TorchBackend(build_policy_spec(settings, prepared), precision=DOUBLE)
    found = student.measure(completed, build_offline_loss(settings.distillation)).loss
    expected = by_hand(tiny_model, {"long": teachers[1], "short": teachers[0]}, batch, k, weight)
    assert found == pytest.approx(expected, abs=1e-6)
    again = DoubleTeachers()
    _, read = ask(settings, prepared, batch, again)  # from disk
    assert again.started == []
    assert student.measure(read, build_offline_loss(settings.distillation)).loss == found


def test_distill_offline_the_whole_vocabulary_kept_is_the_exact_divergence(
    tmp_path: Path, tiny_model: Path, teachers: list[Path]
) -> None:
    kept = config(tmp_path, tiny_model, str(teachers[0]), top_k=VOCAB_SIZE)
    exact = config(tmp_path, tiny_model, str(teachers[0]), mode="loss")
    prepared = prepare(kept, "supervised")
    batch = everything(prepared)
    _, completed = ask(kept, prepared, batch)
    spec = dataclasses.replace(build_policy_spec(exact, prepared), teachers=(str(teachers[0]),))
    found, expected = (
        TorchBackend(spec, precision=DOUBLE).train_step(given, build_offline_loss(settings.distillation))
        for settings, given in ((kept, completed), (exact, batch))
    )
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
    softened = config(tmp_path, tiny_model, str(teachers[0]), mode="loss", temperature=1e3)
    nearly_equal = TorchBackend(spec, precision=DOUBLE).measure(batch, build_offline_loss(softened.distillation))
    assert 0 < nearly_equal.loss < 1e-3 * expected.loss


def test_distill_offline_models_that_cannot_teach_are_refused_before_anything_starts(
    tmp_path: Path, tiny_model: Path, teachers: list[Path]
) -> None:
    with pytest.raises(ConfigError, match=r"top_k must be <= 260, .* of teacher\.model '.*', got 300: lower distil"):
        resolve_offline_teachers(config(tmp_path, tiny_model, str(teachers[0]), top_k=300), tiny_model)
    other = write_tiny_model(tmp_path / "other")
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    for place in ("precomputed", "loss"):
        with pytest.raises(ModelError, match=r"differs from that of model\.path .* 2 of the student's differ"):
            resolve_offline_teachers(config(tmp_path, tiny_model, str(other), mode=place), tiny_model)
    longer = write_tiny_model(tmp_path / "longer")
    described = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps({**described, "vocab_size": 272}))
    for settings in ({"top_k": 8}, {"mode": "loss"}):
        assert resolve_offline_teachers(config(tmp_path, tiny_model, str(longer), **settings), tiny_model) == [longer]


@pytest.mark.parametrize(
    ("teacher", "distillation", "message"),
    [
        ("t", {"divergence": "reverse"}, "reverse requires full distributions, but `mode: precomputed`"),
        ("t", {"temperature": 2.0}, "temperature 2 requires full distributions, but `mode: precomputed`"),
        ("t", {"mode": "loss", "directory": "d"}, "directory is supported only with `mode: precomputed`"),
        ({"model": "t", "backend": "engine"}, {}, "set teacher.backend to trainer"),
        ([{"model": "t", "domains": ["long"]}], {}, "'short' has no teacher"),
        ("t", {"weight": 0.0}, "greater than 0"),
    ],
)
def test_distill_offline_settings_that_do_not_fit_are_refused(
    tmp_path: Path, tiny_model: Path, teacher: Any, distillation: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(tmp_path, tiny_model, teacher, **distillation)
