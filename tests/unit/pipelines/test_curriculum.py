"""Which environment is drawn next: half of the episodes solved counts most."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from roll.config.pipelines.agentic import AgenticConfig
from roll.pipelines.episodes.curriculum import choose_domain, compute_domain_probabilities, update_success_rates
from roll.pipelines.episodes.state import AgenticState
from roll.types import Anchor, Group, Prompt, PromptDraw, RewardResult, Rollout, Trajectory


def config(**changes: object) -> AgenticConfig:
    return AgenticConfig.model_validate(
        {
            "pipeline": "agentic",
            "name": "x",
            "model": "m",
            "training": {"num_steps": 1},
            "environments": [{"environment": "a"}, {"environment": "b", "weight": 3.0}],
            "curriculum": {"num_episodes": 2, "min_share": 0.2},
            **changes,
        }
    )


def group(domain: str, *solved: bool) -> Group:
    draw = PromptDraw(draw_id=0, prompt=Prompt(uid="u", domain=domain, messages=()), token_ids=np.zeros(1, np.int32))
    empty = np.zeros(0, np.int32)
    rollouts = tuple(
        Rollout(
            draw_id=0,
            index=index,
            prompt=draw.prompt,
            prompt_token_ids=draw.token_ids,
            token_ids=empty,
            logprobs=empty.astype(np.float32),
            policy_versions=empty,
            finish_reason="stop",
            text="",
            reward=RewardResult(value=float(won), correct=won),
        )
        for index, won in enumerate(solved)
    )
    return Group(draw=draw, rollouts=rollouts)


def test_curriculum_shares_are_weights_times_4_p_of_1_minus_p_and_no_less_than_the_least() -> None:
    assert compute_domain_probabilities(config(), {}) == {"a": 0.25, "b": 0.75}
    assert compute_domain_probabilities(config(), {"a": 0.25, "b": 1.0}) == pytest.approx(
        {"a": 0.75 / 1.35, "b": 0.6 / 1.35}
    )


def test_curriculum_averages_forget_and_what_was_not_played_has_none() -> None:
    state = AgenticState(data={})
    curriculum = config().curriculum
    assert curriculum is not None
    update_success_rates(curriculum, state, [group("a", True, True, False, False)])
    assert state.success_rates == {"a": 0.5}
    update_success_rates(curriculum, state, [group("a", True, True), group("b")])
    assert state.success_rates == {"a": 0.25 * 0.5 + 0.75}  # each of two episodes halves what was before


def test_curriculum_episodes_that_began_in_the_midst_of_a_success_say_nothing_of_how_hard_a_task_is() -> None:
    curriculum = config().curriculum
    assert curriculum is not None
    state = AgenticState(data={})
    one = group("a", True, True)
    empty = Trajectory(uid="a/0", prompt_token_ids=one.draw.token_ids, token_ids=one.draw.token_ids, turns=(), reward=1)
    begun = replace(one, draw=replace(one.draw, anchor=Anchor(trajectory=empty, num_turns=1)))
    update_success_rates(curriculum, state, [begun, group("a", False, False)])
    assert state.success_rates == {"a": 0.0}


def test_curriculum_draws_follow_the_shares_and_depend_on_nothing_else() -> None:
    state = AgenticState(data={}, success_rates={"a": 0.25, "b": 1.0})
    settings, others = config(), config(seed=1)
    drawn = [choose_domain(settings, state, number) for number in range(4000)]
    assert drawn[:50] == [choose_domain(config(), state, number) for number in range(50)]
    assert Counter(drawn)["a"] / 4000 == pytest.approx(0.75 / 1.35, abs=0.03)
    assert drawn != [choose_domain(others, state, number) for number in range(4000)]


def test_curriculum_a_curriculum_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="curriculum requires at least two environments"):
        config(environments=[{"environment": "a"}])
    with pytest.raises(ValueError, match="domain_quotas cannot be combined"):
        config(rollout={"prompts_per_step": 8, "scheduling": {"domain_quotas": True}})
    with pytest.raises(ValueError, match="environment names must be unique"):
        config(environments=[{"environment": "a"}, {"environment": "a"}])
    with pytest.raises(ValueError, match="is not supported with the pipeline agentic"):
        config(tracking={"record_rollouts": True})


def test_curriculum_what_hosts_need_is_checked() -> None:
    with pytest.raises(ValueError, match="host http requires the url"):
        config(environments=[{"environment": "a", "host": "http"}, {"environment": "b"}])
    with pytest.raises(ValueError, match="url is supported only with host http, got host loop"):
        config(environments=[{"environment": "a", "host": "loop", "url": "http://x"}, {"environment": "b"}])
