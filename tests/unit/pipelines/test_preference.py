"""Preferences by name: what each method is made of, what it is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from pydantic import ValidationError

from roll.algorithms.losses import KTOLoss, PreferenceLoss
from roll.algorithms.losses.preference.pairwise import SigmoidLoss, SquaredLoss
from roll.config.preference import METHODS, PreferenceSection
from roll.errors import ConfigError
from roll.pipelines.learning.losses import build_preference_loss
from roll.pipelines.preference.objective import PreferenceObjective, mismatch_answers
from roll.pipelines.supervised.evaluation import compute_held_out_metrics, merge_metrics
from roll.pipelines.supervised.output_store import OutputStore, build_rows
from roll.types import MediaSpan, StepResult, TrainingBatch, TrainingSample


def sample(draw: int, asked: list[int], answer: list[int]) -> TrainingSample:
    mask = np.array([False] * len(asked) + [True] * len(answer))
    return TrainingSample(
        sample_id=str(draw), unit=draw, token_ids=np.array([*asked, *answer], np.int32), loss_mask=mask
    )


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.compares_pairs])
def test_preference_every_method_is_a_loss_that_needs_a_reference_where_it_says_so(name: str) -> None:
    section = PreferenceSection.model_validate({"type": name})
    loss = build_preference_loss(section)
    assert loss.against_reference == section.method.uses_reference
    assert loss.needs.whole_units


def test_preference_methods_are_as_their_papers_have_them() -> None:
    def of(**settings: object) -> PreferenceLoss:
        return build_preference_loss(PreferenceSection.model_validate(settings))

    assert of(type="dpo") == PreferenceLoss(pairwise_loss=SigmoidLoss(), beta=0.1)
    assert of(type="robust", label_smoothing=0.2).pairwise_loss == SigmoidLoss(label_smoothing=0.2, robust=True)
    assert of(type="ipo", beta=0.3) == PreferenceLoss(pairwise_loss=SquaredLoss(), beta=0.3, scores="mean")
    simpo = of(type="simpo")
    assert (simpo.beta, simpo.margin, simpo.scores, simpo.against_reference) == (2.0, 1.0, "mean", False)
    assert of(type="orpo").likelihood == 1.0


def test_preference_a_setting_that_means_nothing_to_a_method_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"orpo does not support `margin`; supported settings: beta, likelihood"):
        PreferenceSection.model_validate({"type": "orpo", "margin": 0.5})
    with pytest.raises(ValidationError, match="simpo does not use a reference"):
        PreferenceSection.model_validate({"type": "simpo", "reference_model": "m"})
    with pytest.raises(ConfigError, match=r"preference\.type exo: label_smoothing must be > 0"):
        build_preference_loss(PreferenceSection(type="exo", label_smoothing=0.0))


def test_preference_every_prompt_gets_the_answer_before_it() -> None:
    batch = [sample(0, [1, 2], [3]), sample(1, [4], [5, 6]), sample(2, [7, 8, 9], [10])]
    others = mismatch_answers(batch, None)
    assert [s.token_ids.tolist() for s in others] == [[1, 2, 10], [4, 3], [7, 8, 9, 5, 6]]
    assert [s.loss_mask.tolist() for s in others] == [[0, 0, 1], [0, 1], [0, 0, 0, 1, 1]]
    assert mismatch_answers(batch, 4)[2].token_ids.tolist() == [7, 8, 9, 5]
    assert mismatch_answers(batch[:1], None) == ()


def test_preference_every_prompt_keeps_its_images_with_the_answer_before_it() -> None:
    def shown(digest: str, start: int) -> MediaSpan:
        return MediaSpan(kind="image", digest=digest, start=start, end=start + 2)

    batch = [
        replace(sample(0, [1, 9, 9, 2], [3, 9, 9, 4]), media=(shown("aa", 1), shown("bb", 5))),
        replace(sample(1, [9, 9], [5]), media=(shown("cc", 0),)),
        sample(2, [7], [8]),
    ]
    first, second, third = mismatch_answers(batch, None)
    assert (first.token_ids.tolist(), first.media) == ([1, 9, 9, 2, 8], (shown("aa", 1),))
    assert (second.token_ids.tolist(), second.media) == ([9, 9, 3, 9, 9, 4], (shown("cc", 0), shown("bb", 3)))
    assert (third.token_ids.tolist(), third.media) == ([7, 5], ())
    second = mismatch_answers(batch, 4)[1]  # an image is never cut
    assert (second.token_ids.tolist(), second.media) == ([9, 9, 3], (shown("cc", 0),))


def test_preference_kto_measures_how_far_answers_to_other_prompts_have_come_from_the_reference() -> None:
    """log ratios of the answers to other prompts: 0.5 for each of their tokens, 1, 1 and 2 of them."""

    class Policy:
        async def measure(self, batch: TrainingBatch, loss: object) -> StepResult:
            said = tuple(np.full(len(s), -1.0, np.float32) for s in batch.samples)
            return StepResult(loss=0.0, num_tokens=0, num_loss_tokens=0, logprobs=said)

    batch, kept = [sample(0, [1, 2], [3]), sample(1, [4], [5, 6]), sample(2, [7, 8, 9], [10])], OutputStore()
    others = mismatch_answers(batch, None)
    kept.add(others, [build_rows(logprobs=np.full(s.loss_mask.sum(), -1.5, np.float32)) for s in others])
    section = PreferenceSection.model_validate({"type": "kto", "beta": 0.3})
    objective = PreferenceObjective(section=section, policy=cast(Any, Policy()), store=kept, max_tokens=None)
    loss = asyncio.run(objective.build_loss(batch))
    assert isinstance(loss, KTOLoss) and loss.beta == 0.3
    assert loss.reference_point == pytest.approx(0.5 * 4 / 3)
    assert asyncio.run(objective.build_loss(batch[:1])).reference_point == 0.0  # type: ignore[attr-defined]


def test_preference_answers_do_not_hide_what_pairs_say() -> None:
    learnt = {"eval/loss": 0.5, "eval/accuracy": 0.9}
    found = merge_metrics(learnt, {"eval/accuracy": 0.25, "eval/score": 0.25})
    assert found == {"eval/loss": 0.5, "eval/examples/accuracy": 0.9, "eval/accuracy": 0.25, "eval/score": 0.25}
    assert merge_metrics(learnt, {}) == learnt


def test_preference_held_out_accuracy_carries_its_pairs_and_its_interval() -> None:
    pair = [sample(i, [1], [2, 3]) for i in range(2)]
    measured = StepResult(loss=0.7, num_tokens=4, num_loss_tokens=4, metrics={"preference/accuracy": 0.5})
    found = compute_held_out_metrics(measured, TrainingBatch(samples=tuple(pair)))
    assert (found["eval/accuracy"], found["eval/accuracy_n"], found["eval/num_examples"]) == (0.5, 2.0, 2.0)
    assert found["eval/accuracy_low"] == pytest.approx(0.0945, abs=1e-4)  # of one of two, Wilson's
    assert found["eval/accuracy_high"] == pytest.approx(1 - 0.0945, abs=1e-4)
    moved = merge_metrics(found, {"eval/accuracy": 0.25, "eval/accuracy_n": 400.0})
    assert moved["eval/examples/accuracy_low"] == found["eval/accuracy_low"] and "eval/accuracy_low" not in moved
    assert "eval/accuracy" not in compute_held_out_metrics(
        replace(measured, metrics={}), TrainingBatch(samples=tuple(pair))
    )
