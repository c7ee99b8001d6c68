"""Conversations with an environment, as one flat sequence of tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.errors import CallbackError
from roll.rollout.episode import choose_loop, play_episode
from roll.rollout.loops import generate_single_answer, load_user_loop
from roll.types import (
    EncodedText,
    EnvironmentSettings,
    Generation,
    GenerationRequest,
    IntArray,
    Message,
    Prompt,
    PromptDraw,
    Rollout,
    SamplingParams,
)
from roll.user_code import load_function


class Numbers:
    """Token 100 + n reads as `n`; an observation is one token 7."""

    def decode_final_text(self, token_ids: IntArray, context: IntArray) -> str:
        return self.decode(token_ids)

    def decode(self, token_ids: IntArray) -> str:
        return " ".join(str(token - 100) for token in token_ids if token >= 100)

    drops_tool_results = False

    def escape_special_tokens(self, text: str) -> str:
        return text

    def tokenize_follow_up(self, observation: str) -> IntArray:
        return np.array([7], dtype=np.int32)

    def render_text(self, messages: Sequence[Message], tools: Sequence[object] = ()) -> str:
        return "".join(message.text for message in messages)

    def encode(self, text: str) -> EncodedText:
        raise AssertionError("nothing is written anew")

    def parse_answer(self, answer: IntArray, context: IntArray, stops: Collection[int] = ()) -> tuple[str, bool]:
        return self.decode(answer), True

    def encode_suffix(self, text: str, has_end_token: bool) -> EncodedText | None:
        return EncodedText(np.array([7], dtype=np.int32))


class Script:
    """An engine that answers with given tokens, in turn."""

    def __init__(self, *answers: list[int], finish: str = "stop") -> None:
        self.answers, self.finish = list(answers), finish
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        tokens = self.answers.pop(0)
        return Generation(
            request_id=request.request_id,
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.full(len(tokens), -1.0, np.float32),
            policy_versions=np.full(len(tokens), 3, np.int32),
            finish_reason=self.finish,
            engine_id="e",
        )


def draw(secret: int, num_turns: int = 2) -> PromptDraw:
    options = {"max_number": 5, "num_turns": num_turns, "secret": secret}
    environment = EnvironmentSettings(name="guess_number", options=options)
    prompt = Prompt(uid="g/1", domain="g", messages=(), environment=environment, turns=num_turns)
    return PromptDraw(draw_id=4, prompt=prompt, token_ids=np.array([1, 2], dtype=np.int32))


async def episode(script: Script, secret: int, num_turns: int = 2) -> Rollout:
    drawn = draw(secret, num_turns)
    first = GenerationRequest(
        request_id="train-4.0", token_ids=drawn.token_ids, sampling=SamplingParams(max_new_tokens=8, seed=11)
    )
    return await play_episode(drawn, 0, first, script.generate, Numbers())


async def test_rollout_loop_turns_and_observations_lie_in_one_sequence() -> None:
    script = Script([102, 9], [104, 9])
    rollout = await episode(script, secret=4)
    assert rollout.token_ids.tolist() == [102, 9, 7, 104, 9]
    assert [(t.start, t.end, t.reward, t.state) for t in rollout.turns] == [
        (0, 2, 0.0, "start"),
        (3, 5, 1.0, "2 higher"),
    ]
    assert rollout.logprobs.tolist() == [-1.0, -1.0, 0.0, -1.0, -1.0]
    assert rollout.policy_versions.tolist() == [3, 3, -1, 3, 3]
    assert script.requests[1].token_ids.tolist() == [1, 2, 102, 9, 7]  # what the model wrote, never tokenised again
    assert [r.request_id for r in script.requests] == ["train-4.0", "train-4.0.t1"]
    assert len({r.sampling.seed for r in script.requests}) == 2


async def test_rollout_loop_a_right_guess_ends_the_episode_at_once() -> None:
    rollout = await episode(Script([104]), secret=4)
    assert [(t.start, t.end, t.reward) for t in rollout.turns] == [(0, 1, 1.0)]


async def test_rollout_loop_a_turn_that_was_cut_off_ends_the_episode_unfinished() -> None:
    rollout = await episode(Script([104], finish="length"), secret=4)
    assert not rollout.is_finished
    assert [t.reward for t in rollout.turns] == [0.0]


async def test_rollout_loop_the_same_seed_gives_the_same_requests() -> None:
    seeds = []
    for _ in range(2):
        script = Script([101], [102], [103])
        await episode(script, secret=5, num_turns=3)
        seeds.append([r.sampling.seed for r in script.requests])
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize("tokens", [[5], []])
async def test_rollout_loop_a_single_answer_has_no_turns_of_its_own(tokens: list[int]) -> None:
    drawn = draw(1)
    first = GenerationRequest(
        request_id="r", token_ids=drawn.token_ids, sampling=SamplingParams(max_new_tokens=8, seed=1)
    )
    rollout = await generate_single_answer(drawn, 2, first, Script(tokens).generate, Numbers())
    assert rollout.turns == ()
    assert [(t.start, t.end) for t in rollout.spans] == [(0, len(tokens))]
    assert rollout.index == 2


async def test_rollout_loop_the_example_of_a_loop_of_ones_own_asks_twice() -> None:
    second_try = load_function("examples/loops/second_try.py:second_try", "rollout loop")
    drawn = draw(1)
    first = GenerationRequest(
        request_id="r", token_ids=drawn.token_ids, sampling=SamplingParams(max_new_tokens=8, seed=1)
    )
    script = Script([101, 9], [102, 9])
    rollout = await second_try(drawn, 0, first, script.generate, Numbers())
    assert rollout.token_ids.tolist() == [101, 9, 7, 102, 9]
    assert [(t.start, t.end) for t in rollout.turns] == [(0, 2), (3, 5)]
    assert script.requests[1].token_ids.tolist() == [1, 2, 101, 9, 7]


def test_rollout_loop_a_column_of_data_that_is_called_env_makes_no_game() -> None:
    plain = Prompt(uid="d/1", domain="d", messages=(), metadata={"env": {"name": "guess_number", "options": {}}})
    assert choose_loop(plain) is generate_single_answer
    assert choose_loop(draw(1).prompt) is play_episode


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("async def {}: return 3", r"must return a Rollout, got int\."),
        ("def {}: return 3", r"failed at .*: TypeError: object int can't be used in 'await' expression"),
        ("async def {}: raise KeyError('a')", r"failed at .*load_own_loop\.py:1: KeyError: 'a'"),
        ("async def {}: raise SystemExit(3)", r"failed at .*load_own_loop\.py:1: SystemExit: 3"),
    ],
)
async def test_rollout_loop_a_loop_of_ones_own_that_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "load_own_loop.py").write_text(text.format("loop(draw, index, first, generate, renderer)"))
    path = f"{tmp_path}/load_own_loop.py:loop"
    loop: Any = load_user_loop(path)
    with pytest.raises(CallbackError, match=f"rollout loop '{path}' {words}"):
        await loop(None, 0, None, None, None)
