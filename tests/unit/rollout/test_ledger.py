"""Every draw has exactly one fate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.errors import CheckpointError
from roll.rollout import DataLedger
from roll.types import Fate, Prompt, PromptDraw


def draw(draw_id: int) -> PromptDraw:
    prompt = Prompt(uid=f"source/{draw_id}", domain="d", messages=())
    return PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=np.zeros(1, np.int32))


def test_ledger_a_draw_is_settled_once() -> None:
    ledger = DataLedger()
    ledger.record_draws([draw(0)], step=1)
    ledger.record_outcome(0, Fate.TRAINED, step=1)
    with pytest.raises(AssertionError, match="already trained"):
        ledger.record_outcome(0, Fate.FILTERED, step=2)


def test_ledger_draws_are_opened_in_order_without_gaps() -> None:
    ledger = DataLedger()
    ledger.record_draws([draw(0)], step=1)
    with pytest.raises(AssertionError, match="draw 2 recorded after 1"):
        ledger.record_draws([draw(2)], step=1)


@given(st.lists(st.sampled_from(list(Fate)), max_size=30))
def test_ledger_reading_back_gives_the_same_ledger(fates: list[Fate]) -> None:
    ledger = DataLedger()
    ledger.record_draws([draw(i) for i in range(len(fates))], step=1)
    for i, fate in enumerate(fates):
        if fate is not Fate.IN_FLIGHT:
            ledger.record_outcome(i, fate, step=2, why="because" if fate is Fate.FAILED else "")
    again = DataLedger.loads(ledger.dumps())
    assert list(again) == list(ledger)
    assert again.counts() == {f.value: fates.count(f) for f in Fate}
    assert again.list_in_flight() == [i for i, fate in enumerate(fates) if fate is Fate.IN_FLIGHT]


@pytest.mark.parametrize("text", ["{", '{"draw_id":1,"uid":"a","fate":"trained","step":1,"why":""}', '{"draw_id":0}'])
def test_ledger_a_malformed_ledger_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="line 1"):
        DataLedger.loads(text)
