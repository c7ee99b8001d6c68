"""Recorded runs of a tiny random model, again: the same numbers without engines, the same work without a trainer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config
from safetensors.torch import load_file
from worlds.timing import is_timing
from worlds.tiny_model import write_tiny_model

import roll
from roll.errors import ConfigError, DataError, ModelError
from roll.inference.hf import HFEngine
from roll.pipelines.learning import updates
from roll.pipelines.recording.files import Recording

FROM_ENGINES = ("sync/", "env/")  # a replay has neither engines nor environments
LETTERS = {"type": "regex", "pattern": "[a-m]", "require_finished": False}
QUIET = {"every_num_steps": 0, "num_prompts": 1, "before_training": False}


def record(directory: Path, model: Path, /, *, num_steps: int = 4, name: str = "run", **changes: Any) -> Path:
    """Train and record; returns the run's directory."""
    base = tiny_config(model, num_steps=num_steps)
    base["tracking"]["record_rollouts"] = True
    base["rollout"] |= changes.pop("rollout", {})
    roll.train({**base, "evaluation": QUIET, "output_dir": str(directory), "name": name, **changes})
    return directory / name


def rows(run: Path) -> list[dict[str, Any]]:
    """Metrics of the steps, without durations, what only engines say, and the nulls of keys that earlier steps had."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if v is not None and not is_timing(k) and not k.startswith(FROM_ENGINES)}
        for row in found
        if row["kind"] == "train"
    ]


def newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def assert_same(run: Path, replayed: Path, first: int = 1) -> None:
    """Metrics, weights, ledger and the boundary are equal, bit for bit."""
    assert [row for row in rows(run) if row["step"] >= first] == rows(replayed)
    one, other = (load_file(newest(path) / "model" / "model.safetensors") for path in (run, replayed))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    assert (newest(run) / "ledger.jsonl").read_text() == (newest(replayed) / "ledger.jsonl").read_text()
    evaluated = ("scores", "evaluated_at", "best_step", "unchanging")  # nobody answers held-out rows in a replay
    one, other = (json.loads((newest(path) / "state.json").read_text()) for path in (run, replayed))
    assert {**one, **dict.fromkeys(evaluated)} == {**other, **dict.fromkeys(evaluated)}
    one, other = (
        {k: v for k, v in state["unchanging"].items() if not k.startswith("the held-out rows")}
        for state in (one, other)
    )
    assert one == other


KINDS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"rollout": {"scheduling": {"async_ratio": 1.0}}},
    "tail_batching": {"rollout": {"scheduling": {"type": "tail_batching"}}},
    "refills_greedy_minibatches": {
        "algorithm": {
            "advantage": {"mean": "greedy", "std": "none"},
            "filters": {"refill": True, "max_mean": 0.9},
            "updates": {"num_minibatches": 2},
            "kl": {"coefficient": 0.1},
        },
    },
    "turns": {
        "data": [
            {"source": "guess_number", "max_number": 3, "num_turns": 2, "reward": [{"type": "environment"}, LETTERS]}
        ],
        "algorithm": {"type": "ipa"},
    },
}


@pytest.mark.parametrize(
    "kind", [kind if kind == "asynchronous" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_replay_run_a_replay_without_changes_gives_the_recorded_numbers_bit_for_bit(
    tmp_path: Path, tiny_model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record(tmp_path, tiny_model, **KINDS[kind])
    monkeypatch.setattr(HFEngine, "start", None)  # nobody may start one
    roll.replay(run)
    assert len(rows(run)) == 4
    assert_same(run, tmp_path / "run-replay")


@pytest.mark.slow
def test_replay_run_a_run_that_was_resumed_is_recorded_and_replayed_as_one(tmp_path: Path, tiny_model: Path) -> None:
    saved = {"every_num_steps": 2, "keep_last": 9}
    run = record(tmp_path, tiny_model, rollout={"scheduling": {"async_ratio": 1.0}}, checkpoint=saved)
    shutil.rmtree(newest(run))  # as if it had been killed after its last step, with the checkpoint of step 2
    roll.resume(run)
    recording = Recording.open(run)
    assert (recording.first_step, recording.last_step) == (1, 4)
    assert [session.step for session in recording.list_used_sessions()] == [0, 2]
    roll.replay(run)
    assert_same(run, tmp_path / "run-replay")


@pytest.mark.slow
def test_replay_run_a_replay_begins_at_a_checkpoint_and_is_itself_resumed(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record(tmp_path, tiny_model, checkpoint={"every_num_steps": 1, "keep_last": 9})
    roll.replay(run, ["name=late"], checkpoint=run / "checkpoints" / "step-000002")
    assert_same(run, tmp_path / "late", first=3)

    train, calls = updates.train_policy, []

    async def fail_at_the_third(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return await train(*args)

    with monkeypatch.context() as patch:
        patch.setattr(updates, "train_policy", fail_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            roll.replay(run, ["name=broken"])
    roll.resume(tmp_path / "broken")
    assert_same(run, tmp_path / "broken")


@pytest.mark.slow
def test_replay_run_another_algorithm_trains_on_the_recorded_answers(tmp_path: Path, tiny_model: Path) -> None:
    run = record(tmp_path, tiny_model)
    roll.replay(run, ["name=other", "algorithm.type=gspo", "training.learning_rate=5e-3"])
    resolved = (tmp_path / "other" / "config.yaml").read_text()
    assert "level: sequence" in resolved  # of gspo; grpo's would have stayed, had its resolved keys been taken over
    before, after = rows(run), rows(tmp_path / "other")
    answered = ("reward/mean", "rollout/length_mean", "rollout/staleness_max", "hacking/repeated_text_share")
    assert [[row[key] for key in answered] for row in before] == [[row[key] for key in answered] for row in after]
    assert before[-1]["training/grad_norm"] != after[-1]["training/grad_norm"]
    # The policy is not the one that answered any more, and the agreement with the recorded log-probs says so.
    assert after[0]["agreement/logprob_mean_abs"] == before[0]["agreement/logprob_mean_abs"]
    assert after[-1]["agreement/logprob_mean_abs"] > 10 * before[-1]["agreement/logprob_mean_abs"]


def test_replay_run_what_cannot_be_replayed_is_refused_and_leaves_nothing_behind(
    tmp_path: Path, tiny_model: Path
) -> None:
    own = shutil.copytree(tiny_model, tmp_path / "model")
    run = record(tmp_path, own, num_steps=2)
    refused: list[tuple[list[str], type[Exception], str]] = [
        (["training.num_steps=3"], ConfigError, r"num_steps must be <= 2, the last step of the recording .*, got 3"),
        (["rollout.group_size=8"], ConfigError, r"rollout\.group_size: recorded 4, now 8"),
        (["seed=1"], ConfigError, r"seed: recorded 0, now 1"),
        (
            ["algorithm.advantage.mean=greedy"],
            ConfigError,
            "but the recorded run has no greedy answers",
        ),
        (["tracking.record_rollouts=true"], ConfigError, "is not supported in a replay"),
        (["replay.checkpoint=nowhere"], ConfigError, "'nowhere' is not a checkpoint"),
        (["replay.lengths=free"], ConfigError, "is not supported with `only: train`"),
    ]
    for overrides, kind, what in refused:
        with pytest.raises(kind, match=what):
            roll.replay(run, overrides)
    write_tiny_model(own, seed=1)
    with pytest.raises(ModelError, match="differs from the model of the recorded run"):
        roll.replay(run)
    write_tiny_model(own)
    settings = json.loads((own / "tokenizer_config.json").read_text())
    settings["chat_template"] = settings["chat_template"].replace("assistant", "helper")
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"the tokenizer in .* and the recorded run's differ"):
        roll.replay(run)
    assert not (tmp_path / "run-replay").exists()


@pytest.mark.slow
def test_replay_run_other_prompts_and_a_missing_recording_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"Say {i}.", "answer": str(i)}) for i in range(8)]
    file.write_text("\n".join(lines))
    run = record(tmp_path, tiny_model, num_steps=1, data=[{"source": "file", "path": str(file), "reward": [LETTERS]}])
    file.write_text("\n".join(reversed(lines)))
    with pytest.raises(DataError, match="the data differ from those of the recorded run"):
        roll.replay(run)
    shutil.rmtree(run / "recording")
    with pytest.raises(DataError, match=r"has no recording"):
        roll.replay(run)


@pytest.mark.slow
@pytest.mark.parametrize("scheduling", [{}, {"async_ratio": 1.0}], ids=["synchronous", "asynchronous"])
def test_replay_run_the_recorded_prompts_get_answers_of_the_recorded_lengths(
    tmp_path: Path, tiny_model: Path, scheduling: dict[str, Any]
) -> None:
    run = record(tmp_path, tiny_model, num_steps=3, rollout={"scheduling": scheduling})
    roll.replay(run, only="rollout")
    before, after = rows(run), rows(tmp_path / "run-rollouts")
    assert [row["step"] for row in after] == [1, 2, 3]
    for key in ("reward/mean", "rollout/length_mean", "rollout/length_max", "rollout/unfinished_share"):
        assert [row[key] for row in before] == [row[key] for row in after]
    found = json.loads((tmp_path / "run-rollouts" / "replay.json").read_text())
    assert [step["step"] for step in found["steps"]] == [1, 2, 3]
    assert found["total"]["num_tokens"] == sum(row["rollout/num_tokens"] for row in before)
    assert not list((tmp_path / "run-rollouts" / "checkpoints").iterdir())


@pytest.mark.slow
def test_replay_run_recorded_turns_are_played_again_and_free_answers_come_from_a_checkpoint(
    tmp_path: Path, tiny_model: Path
) -> None:
    run = record(tmp_path, tiny_model, num_steps=2, **KINDS["turns"])
    roll.replay(run, only="rollout")
    assert [row["rollout/num_tokens"] for row in rows(run)] == [
        row["rollout/num_tokens"] for row in rows(tmp_path / "run-rollouts")
    ]
    roll.replay(run, ["name=free", "replay.lengths=free"], only="rollout", checkpoint=run)
    assert len(rows(tmp_path / "free")) == 2
