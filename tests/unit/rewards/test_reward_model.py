"""Reward models: a tiny random one, alone and in batches, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification
from worlds.tiny_model import write_tiny_model

from roll.cluster.pool import LocalWorkerPool
from roll.config.load import load_config
from roll.config.rewards import RewardList, expand_rewards
from roll.data.chat import ChatRenderer
from roll.errors import ModelError, RewardInfraError, UnscorableError
from roll.rewards import build_reward
from roll.rewards.batching import Batcher
from roll.rewards.compose import WeightedReward
from roll.rewards.reward_model import _resolve_device, _tokenize, check_reward_models
from roll.types import Message, Rollout

MakeRollout = Callable[..., Rollout]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with two outputs, the tiny model's tokenizer, and nothing else."""
    path = write_tiny_model(tmp_path_factory.mktemp("reward") / "model")
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(path, num_labels=2)
    LlamaForSequenceClassification(config).float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(model_path: Path) -> Callable[[str], list[float]]:
    """The model's outputs for the rollouts' prompt and an answer, one at a time."""
    model = LlamaForSequenceClassification.from_pretrained(model_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path)

    def compute(answer: str) -> list[float]:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
        with torch.inference_mode():
            return model(input_ids=ids).logits[0].tolist()

    return compute


def build(pool: LocalWorkerPool, path: Path, **settings: Any) -> WeightedReward:
    entry = {"type": "reward_model", "path": str(path), "device": "cpu", **settings}
    return build_reward(TypeAdapter(RewardList).validate_python(expand_rewards(entry)), pool)


@pytest.mark.integration
async def test_reward_model_answers_scored_together_get_what_each_gets_alone(
    pool: LocalWorkerPool, rollout: MakeRollout, model_path: Path, expected: Callable[[str], list[float]]
) -> None:
    reward = build(pool, model_path, label=1, scale=2.0, shift=1.0, solved_at=1.0, batch_size=4)
    answers = ["short", "a much longer answer than the others, by far", "", "x" * 200, "7", "eight"]
    results = await asyncio.gather(*(reward(rollout(answer)) for answer in answers))
    for answer, result in zip(answers, results, strict=True):
        value = 2.0 * expected(answer)[1] + 1.0
        assert result.value == pytest.approx(value, abs=1e-4)
        assert result.correct is (result.value >= 1.0)
    assert len({round(result.value, 6) for result in results}) == len(answers)
    assert pool.health()["busy"] == 0  # the pool of the other verifiers did nothing
    assert all(worker._process is None for worker in pool._workers)
    await reward.close()
    await reward.close()


@pytest.mark.integration
async def test_reward_model_outputs_may_be_probabilities_and_long_texts_are_cut_at_their_beginning(
    pool: LocalWorkerPool, rollout: MakeRollout, model_path: Path, expected: Callable[[str], list[float]]
) -> None:
    logits = torch.tensor(expected("hello"))
    probability = build(pool, model_path, output="probability", label=1)
    assert (await probability(rollout("hello"))).value == pytest.approx(float(logits.softmax(0)[1]), abs=1e-5)
    await probability.close()
    squeezed = build(pool, model_path, output="sigmoid", max_length=8)
    assert (await squeezed(rollout("aaaa" + "b" * 50))).value == (await squeezed(rollout("b" * 60))).value
    await squeezed.close()


def test_reward_model_a_template_that_writes_the_date_is_rendered_as_it_was_in_training(model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.chat_template = "Today: {{ strftime_now('%d %b %Y') }}\n" + tokenizer.chat_template
    chat: list[Message] = [Message(role="user", content="?")]
    trained, _ = ChatRenderer(tokenizer).tokenize_conversation([*chat, Message(role="assistant", content="yes")])
    assert _tokenize(tokenizer, chat, "yes", 1000) == trained.tolist()
    assert tokenizer.decode(trained).startswith("Today: 01 Jan 2025")


def test_reward_model_a_model_that_scores_nothing_is_refused_before_anything_starts(
    tiny_model: Path, model_path: Path
) -> None:
    def data(path: Path) -> list[Any]:
        entry = {"source": "arithmetic", "reward": {"type": "reward_model", "path": str(path)}}
        base = {"name": "x", "model": "m", "data": [entry], "training": {"num_steps": 1}}
        return load_config(base).data

    check_reward_models(data(model_path))
    with pytest.raises(ModelError, match=r"is not a reward model: a LlamaForCausalLM generates text without scores"):
        check_reward_models(data(tiny_model))
    with pytest.raises(ModelError, match="is not a directory on this machine"):
        check_reward_models(data(tiny_model / "nowhere"))


@pytest.mark.integration
async def test_reward_model_a_model_without_a_head_or_with_fewer_outputs_is_refused(
    pool: LocalWorkerPool, rollout: MakeRollout, model_path: Path, tiny_model: Path
) -> None:
    plain, narrow = build(pool, tiny_model), build(pool, model_path, label=2)
    with pytest.raises(UnscorableError, match=r"is not a reward model: it is missing the weights \['score.weight'\]"):
        await plain(rollout("a"))
    with pytest.raises(UnscorableError, match="has 2 outputs, so `label` must be below 2, got 2"):
        await narrow(rollout("a"))
    missing = build(pool, tiny_model / "nowhere")
    with pytest.raises(UnscorableError, match="not a directory"):
        await missing(rollout("a"))
    for reward in (plain, narrow, missing):
        await reward.close()


@pytest.mark.integration
async def test_reward_model_a_model_that_takes_too_long_is_our_failure(
    pool: LocalWorkerPool, rollout: MakeRollout, model_path: Path
) -> None:
    reward = build(pool, model_path, time_limit_s=0.001)
    with pytest.raises(RewardInfraError, match=r"the reward model .* did not score a batch within 0\.001 s"):
        await reward(rollout("a"))
    await reward.close()


class Recorder:
    """Scores numbers as their squares, when told to."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.under_way = self.most = 0

    async def score(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await self.gate.wait()
        self.under_way -= 1
        if 13 in items:
            raise ValueError("unlucky")
        return [item * item for item in items]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_reward_model_requests_that_come_while_a_batch_runs_go_together() -> None:
    recorder = Recorder()
    batcher: Batcher[int, int] = Batcher(recorder.score, batch_size=4, num_runners=1)
    first = asyncio.create_task(batcher.submit(0))
    await settle()
    others = [asyncio.create_task(batcher.submit(i)) for i in range(1, 7)]
    await settle()
    recorder.gate.set()
    assert await asyncio.gather(first, *others) == [0, 1, 4, 9, 16, 25, 36]
    assert recorder.batches == [[0], [1, 2, 3, 4], [5, 6]]
    assert recorder.most == 1


async def test_reward_model_several_runners_share_the_work_and_errors_stay_with_their_batch() -> None:
    recorder = Recorder()
    recorder.gate.set()
    batcher: Batcher[int, int] = Batcher(recorder.score, batch_size=2, num_runners=2)
    results = await asyncio.gather(*(batcher.submit(i) for i in (12, 13, 1, 2)), return_exceptions=True)
    assert [type(result) for result in results] == [ValueError, ValueError, int, int]
    assert await batcher.submit(3) == 9


async def test_reward_model_who_has_gone_is_not_scored_and_closing_ends_the_rest() -> None:
    recorder = Recorder()
    batcher: Batcher[int, int] = Batcher(recorder.score, batch_size=1, num_runners=1)
    running, gone, waiting = (asyncio.create_task(batcher.submit(i)) for i in range(3))
    await settle()
    gone.cancel()
    await settle()
    await batcher.close()
    results = await asyncio.gather(running, gone, waiting, return_exceptions=True)
    assert [type(result) for result in results] == [RewardInfraError, asyncio.CancelledError, RewardInfraError]
    assert recorder.batches == [[0]]
    with pytest.raises(RewardInfraError, match="closed"):
        await batcher.submit(1)


def test_reward_model_without_a_device_auto_is_the_cpu_also_for_a_build_that_could_use_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch names the accelerator that it was built for, unless it is asked whether there is one."""

    def built_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for_cuda)
    assert _resolve_device("auto") == torch.device("cpu")
