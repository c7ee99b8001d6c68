"""The run's judge: verdicts weighed by tokens, replies in form from any model, and what its failures become."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from roll.cluster.pool import LocalWorkerPool
from roll.config.rewards import JudgeReward, RewardList, expand_rewards
from roll.errors import ConfigError, RewardInfraError, UnscorableError
from roll.models import find_stop_token_ids, load_tokenizer
from roll.rewards import build_reward
from roll.rewards.judge.engine_judge import EngineChat, JudgeModel, VerdictNode, build_verdict_tree
from roll.rewards.judge.replies import parse_preference
from roll.rewards.judge.rubrics import build_pairwise_schema, build_pointwise_schema
from roll.types import Generation, GenerationRequest, Message, Rollout

QUESTION: list[Message] = [Message(role="system", content="Judge."), Message(role="user", content="?")]


class Model:
    """Writes what it is told, and weighs by a table: from the text so far to the weights of what may follow."""

    def __init__(self, model: Path, text: str = "", weights: Mapping[str, Mapping[str, float]] | None = None) -> None:
        self.tokenizer = load_tokenizer(model)
        self.text, self.weights = text, weights or {}
        self.asked: list[tuple[str, GenerationRequest]] = []
        self.judge = JudgeModel(
            name="tiny",
            identity="1",
            tokenizer=self.tokenizer,
            stop_token_ids=find_stop_token_ids(model),
            max_context=4096,
            generate=self.generate,
        )

    async def generate(self, request: GenerationRequest, time_limit_s: float) -> Generation:
        asked = self.tokenizer.decode(request.token_ids.tolist())
        self.asked.append((asked, request))
        choices, weighed = request.sampling.choices, None
        tokens = self.tokenizer(self.text, add_special_tokens=False)["input_ids"]
        if choices:
            table = next(table for end, table in self.weights.items() if asked.endswith(end))
            shares = [table.get(self.tokenizer.decode([token]), 0.0) for token in choices]
            weighed = np.log(np.array([shares], np.float32) + 1e-30)
            tokens = [choices[int(np.argmax(shares))]]
        return Generation(
            request_id=request.request_id,
            token_ids=np.array(tokens, np.int32),
            logprobs=np.zeros(len(tokens), np.float32),
            policy_versions=np.zeros(len(tokens), np.int32),
            finish_reason="stop",
            choice_logprobs=weighed,
        )


def config(**settings: Any) -> JudgeReward:
    return JudgeReward.model_validate({"type": "judge", **settings})


SCORES = {'"score": ': {"1": 0.4, "9": 0.6}, '"score": 1': {"0": 0.25, "}": 0.75}}


async def test_reward_engine_judge_a_score_is_the_mean_over_all_verdicts_and_digits_are_told_apart(
    tiny_model: Path,
) -> None:
    model = Model(tiny_model, 'It is \\"so\\" so.", "sco', SCORES)
    reply = json.loads(await EngineChat(config(), model.judge).generate_reply(QUESTION, build_pointwise_schema(1, 10)))
    # 0.4 x (0.25 x 10 + 0.75 x 1) + 0.6 x 9
    assert reply == {"reasoning": 'It is "so" so.', "score": pytest.approx(6.7, abs=1e-5)}
    text, first, second = (asked for asked, _ in model.asked)
    assert text.endswith('assistant\n{"reasoning": "')
    assert first.endswith('{"reasoning": "It is \\"so\\" so.", "score": ') and second == first + "1"
    assert [len(request.sampling.choices) for _, request in model.asked] == [0, 9, 2]


async def test_reward_engine_judge_the_likeliest_verdict_may_be_asked_for_and_nothing_explained(
    tiny_model: Path,
) -> None:
    model = Model(tiny_model, weights=SCORES)
    chat = EngineChat(config(verdict="most_likely", explain=False), model.judge)
    assert json.loads(await chat.generate_reply(QUESTION, build_pointwise_schema(1, 10, explain=False))) == {"score": 9}
    assert model.asked[0][0].endswith('assistant\n{"score": ')


async def test_reward_engine_judge_a_comparison_weighs_all_outcomes(tiny_model: Path) -> None:
    model = Model(tiny_model, weights={'"winner": "': {"A": 0.5, "t": 0.3, "B": 0.2}})
    reply = await EngineChat(config(), model.judge).generate_reply(QUESTION, build_pairwise_schema(explain=False))
    assert json.loads(reply) == {"winner": "A", "probabilities": {"A": 0.5, "B": 0.2, "tie": 0.3}}
    found = parse_preference(reply)
    assert (found.winner, found.points) == ("A", pytest.approx(0.65))  # 0.5 + 0.3 / 2
    assert parse_preference('{"winner": "B", "probabilities": {"A": 7, "B": 0, "tie": 0}}').points == 0.0


async def test_reward_engine_judge_text_ends_at_a_quotation_mark_or_with_the_answer(tiny_model: Path) -> None:
    model = Model(tiny_model, "no \\x escape", SCORES)
    reply = json.loads(await EngineChat(config(), model.judge).generate_reply(QUESTION, build_pointwise_schema(1, 10)))
    assert reply["reasoning"] == "no \\x escape"
    ends = {model.tokenizer.decode([token]) for token in model.asked[0][1].sampling.stop_token_ids}
    assert '"' in ends and "<|im_end|>" in ends and "a" not in ends


async def test_reward_engine_judge_an_answer_too_long_for_the_judge_is_given_up_with_what_to_change(
    tiny_model: Path,
) -> None:
    model = Model(tiny_model, weights=SCORES)
    long: list[Message] = [Message(role="user", content="x" * 4096)]
    with pytest.raises(
        UnscorableError,
        match=r"requires 4126 tokens for this answer, but its context length is 4096: raise judge\.max_context,",
    ):
        await EngineChat(config(explain=False), model.judge).generate_reply(
            long, build_pointwise_schema(1, 10, explain=False)
        )
    assert model.asked == []


@given(st.sets(st.integers(0, 120), min_size=2, max_size=30), st.integers(0, 2**32 - 1))
def test_reward_engine_judge_shares_of_all_verdicts_are_products_along_the_tree_and_sum_to_one(
    values: set[int], seed: int
) -> None:
    chance = np.random.default_rng(seed)
    sequences = {value: tuple(map(ord, f"score: {value}}}")) for value in values}

    def walk(node: VerdictNode, before: Sequence[int], share: float) -> dict[int, float]:
        whole = (*before, *node.prefix)
        if node.leaf is not None:
            assert sequences[node.leaf][: len(whole)] == whole
            return {node.leaf: share}
        shares = chance.dirichlet(np.ones(len(node.branches)))
        found: dict[int, float] = {}
        for (token, branch), part in zip(node.branches.items(), shares, strict=True):
            found |= walk(branch, (*whole, token), share * float(part))
        return found

    found = walk(build_verdict_tree(sequences), (), 1.0)
    assert found.keys() == values
    assert math.isclose(sum(found.values()), 1.0, rel_tol=1e-9)


def build(model: Model | None, pool: LocalWorkerPool, **settings: Any) -> Any:
    entries = TypeAdapter(RewardList).validate_python(expand_rewards({"type": "judge", **settings}))
    return build_reward(entries, pool, None, model.judge if model else None)


async def test_reward_engine_judge_equal_answers_are_judged_once_and_counted(
    tiny_model: Path, pool: LocalWorkerPool, rollout: Callable[..., Rollout]
) -> None:
    model = Model(tiny_model, weights=SCORES)
    reward = build(model, pool, explain=False, solved_at=0.5, rubric="quality")
    first, again = await reward(rollout("It is 7")), await reward(rollout("It is 7"))
    assert first.value == again.value == pytest.approx((6.7 - 1) / 9, abs=1e-5)
    assert (first.correct, first.verdict) == (True, "6.7 of 10")
    assert len(model.asked) == 2  # the root, and what may follow a 1
    assert (model.judge.usage.num_verdicts, model.judge.usage.num_cached) == (2, 1)
    await reward.close()


async def test_reward_engine_judge_what_engines_fail_at_is_never_a_reward(
    tiny_model: Path, pool: LocalWorkerPool, rollout: Callable[..., Rollout]
) -> None:
    model = Model(tiny_model)

    async def unreachable(request: GenerationRequest, time_limit_s: float) -> Generation:
        raise RewardInfraError("no engine")

    model.judge.generate = unreachable
    reward = build(model, pool, rubric="quality")
    with pytest.raises(RewardInfraError, match="no engine"):
        await reward(rollout("It is 7"))
    await reward.close()


async def test_reward_engine_judge_a_judge_without_a_run_is_refused(pool: LocalWorkerPool) -> None:
    with pytest.raises(ConfigError, match="no `url`, and this run has no judge model"):
        build(None, pool)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "m"}, "`model` is supported only with an endpoint: set `url`"),
        ({"api_key_env": "KEY"}, "`api_key_env` is supported only with an endpoint"),
        ({"structured": "none"}, "`structured` is supported only with an endpoint"),
        ({"url": "http://host/v1"}, "requires the name of a model: set `model`"),
        ({"scale": [0, 1000]}, "has 1,001 verdicts, but the run's judge supports at most 101"),
    ],
)
def test_reward_engine_judge_settings_that_do_not_fit_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(**settings)


def test_reward_engine_judge_a_template_without_a_system_role_gets_its_words_from_the_user(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + str(
        tokenizer.chat_template
    )

    async def never(request: GenerationRequest, time_limit_s: float) -> Generation:
        raise AssertionError

    judge = JudgeModel(name="m", identity="", tokenizer=tokenizer, stop_token_ids=(2,), max_context=99, generate=never)
    assert "user\nJudge.\n\n?" in tokenizer.decode(judge.render(QUESTION))
