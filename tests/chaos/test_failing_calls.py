"""A call of a trainer, a teacher or an engine fails at a random moment: an engine is replaced, any other failure ends
the run with what was learnt up to the last boundary. The resumed run equals one in which nothing failed.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import Run
from chaos.test_kill_pipelines import EXAMPLES, ONLINE, configuration
from recorded.runs import hashes

import roll
from roll.errors import RollError
from roll.inference.hf import HFEngine
from roll.training import TorchBackend
from roll.training.passes import PassRunner

TRAINER = (
    "compute_losses",
    "train_step",
    "forward",
    "measure",
    "save",
    "load",
    "export",
    "weights",
    "offload",
    "onload",
)
"""`compute_losses`, of the trainer's passes, fails once it has computed, as an own loss or a full device may."""
ENGINE = ("start", "generate", "logprobs", "update_weights", "pause", "resume", "sleep", "wake")


class Failing:
    """Counts the calls of everything, and lets one of them fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[str] = Counter()
        self.fails: tuple[str, int] | None = None
        for name in TRAINER:
            owner = PassRunner if name == "compute_losses" else TorchBackend
            patch.setattr(owner, name, self._of_trainer(name, getattr(owner, name)))
        for name in ENGINE:
            patch.setattr(HFEngine, name, self._of_engine(name, getattr(HFEngine, name)))

    def _now(self, name: str) -> bool:
        self.seen[name] += 1
        return self.fails == (name, self.seen[name])

    def _of_trainer(self, name: str, inner: Any) -> Any:
        def call(backend: TorchBackend | PassRunner, *args: Any, **keys: Any) -> Any:
            found = inner(backend, *args, **keys) if name == "compute_losses" else None
            if self._now(f"trainer.{name}"):
                raise RuntimeError(f"a test breaks {name}")
            return inner(backend, *args, **keys) if name != "compute_losses" else found

        return call

    def _of_engine(self, name: str, inner: Any) -> Any:
        async def call(engine: HFEngine, *args: Any, **keys: Any) -> Any:
            role = "teacher" if engine.engine_id.startswith("teacher") else "engine"
            if self._now(f"{role}.{name}"):
                engine._mark_dead("a test ends it")
            return await inner(engine, *args, **keys)

        return call


def lasting(run: Path) -> dict[str, str]:
    """What must be the same; how often something was tried again is not."""
    return {name: found for name, found in hashes(run).items() if not name.startswith("metrics")}


def fail_and_compare(failing: Failing, directory: Path, settings: dict[str, Any], reference: Path) -> str:
    """One run in which one call fails; returns what became of it."""
    directory.mkdir()
    given = {**settings, "output_dir": str(directory)}
    failing.seen.clear()
    what = "replaced"
    try:
        roll.train(given)
    except (RollError, RuntimeError) as error:
        assert "a test" in str(error), error
        what = "resumed"
        failing.fails = None
        if (directory / "run" / "config.yaml").exists():
            roll.resume(directory / "run")
        else:
            roll.train(given)
    assert lasting(directory / "run") == lasting(reference)
    assert Run.at(directory / "run").metrics()[-1]["step"] == Run.at(reference).metrics()[-1]["step"]
    return what


def calls(failing: Failing, directory: Path, settings: dict[str, Any]) -> dict[str, int]:
    """How often each is called in a run in which nothing fails."""
    failing.seen.clear()
    failing.fails = None
    roll.train({**settings, "output_dir": str(directory)})
    return dict(failing.seen)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("sft", "trainer.compute_losses"),
        ("sft_hand_over", "engine.generate"),
        ("sft_hand_over", "trainer.offload"),
        ("distill_engine", "teacher.logprobs"),
    ],
)
def test_chaos_failing_calls_what_fails_in_the_middle_is_made_good(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: str
) -> None:
    settings, failing = configuration(name, tmp_path, tiny_model), Failing(monkeypatch)
    count = calls(failing, tmp_path / "reference", settings)[call]
    failing.fails = (call, count // 2 + 1)
    what = fail_and_compare(failing, tmp_path / "fails", settings, tmp_path / "reference" / "run")
    assert what == ("replaced" if call == "engine.generate" else "resumed")


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [*EXAMPLES, *ONLINE])
def test_chaos_failing_calls_any_call_may_fail(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    settings, failing = configuration(name, tmp_path, tiny_model), Failing(monkeypatch)
    rng, counts = random.Random(name), calls(failing, tmp_path / "reference", settings)
    for call, count in counts.items():
        failing.fails = (call, rng.randint(1, count))
        fail_and_compare(failing, tmp_path / call, settings, tmp_path / "reference" / "run")
