"""Every draw has exactly one outcome."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.errors import CheckpointError
from roll.rollout import DataLedger
from roll.types import DrawOutcome, Prompt, PromptDraw


def draw(draw_id: int) -> PromptDraw:
    prompt = Prompt(uid=f"source/{draw_id}", domain="d", messages=())
    return PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=np.zeros(1, np.int32))


def test_ledger_a_draw_is_settled_once() -> None:
    ledger = DataLedger()
    ledger.record_draws([draw(0)], step=1)
    ledger.record_outcome(0, DrawOutcome.TRAINED, step=1)
    with pytest.raises(AssertionError, match="already trained"):
        ledger.record_outcome(0, DrawOutcome.FILTERED, step=2)


def test_ledger_draws_are_opened_in_order_without_gaps() -> None:
    ledger = DataLedger()
    ledger.record_draws([draw(0)], step=1)
    with pytest.raises(AssertionError, match="draw 2 recorded after 1"):
        ledger.record_draws([draw(2)], step=1)


@given(st.lists(st.sampled_from(list(DrawOutcome)), max_size=30))
def test_ledger_reading_back_gives_the_same_ledger(outcomes: list[DrawOutcome]) -> None:
    ledger = DataLedger()
    ledger.record_draws([draw(i) for i in range(len(outcomes))], step=1)
    for i, outcome in enumerate(outcomes):
        if outcome is not DrawOutcome.IN_FLIGHT:
            ledger.record_outcome(i, outcome, step=2, reason="because" if outcome is DrawOutcome.FAILED else "")
    again = DataLedger.loads(ledger.dumps())
    assert list(again) == list(ledger)
    assert again.count_outcomes() == {f.value: outcomes.count(f) for f in DrawOutcome}
    assert again.list_in_flight() == [i for i, outcome in enumerate(outcomes) if outcome is DrawOutcome.IN_FLIGHT]


@pytest.mark.parametrize(
    "text", ["{", '{"draw_id":1,"uid":"a","outcome":"trained","step":1,"why":""}', '{"draw_id":0}']
)
def test_ledger_a_malformed_ledger_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="line 1"):
        DataLedger.loads(text)


def test_ledger_reads_the_former_name_of_the_outcome() -> None:
    ledger = DataLedger.loads('{"draw_id":0,"uid":"a","fate":"trained","step":1,"why":""}\n')
    assert ledger[0].outcome is DrawOutcome.TRAINED
