"""A sample's arrays are aligned with its tokens, or it is refused by the name of the one that is not."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from roll.errors import DataError
from roll.types import TrainingSample

OTHER_SHAPES = {"token_ids", "positions"}
ALIGNED = sorted(f.name for f in fields(TrainingSample) if "Array" in str(f.type) and f.name not in OTHER_SHAPES)


def test_training_sample_arrays_are_known_by_their_type() -> None:
    assert len(ALIGNED) == 14 and {"loss_mask", "rollout_logprobs", "experts"} <= set(ALIGNED)


@pytest.mark.parametrize("name", ALIGNED)
@pytest.mark.parametrize("length", [2, 4])
def test_training_sample_an_array_of_another_length_is_named(name: str, length: int) -> None:
    arrays = {"loss_mask": np.ones(3, np.bool_), name: np.ones(length, np.float32)}
    with pytest.raises(DataError, match=f"'a' has 3 tokens, but {name} has {length} entries"):
        TrainingSample(sample_id="a", unit=0, token_ids=np.arange(3), **arrays)
    arrays[name] = np.ones(3, np.float32)
    assert len(TrainingSample(sample_id="a", unit=0, token_ids=np.arange(3), **arrays)) == 3


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 3), (3, 2), (3, 4), (3, 3, 1)])
def test_training_sample_positions_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    tokens, mask = np.arange(3), np.ones(3, np.bool_)
    with pytest.raises(DataError, match=r"'a' has 3 tokens, but positions have the shape .* must be \[L\] or \[3, L\]"):
        TrainingSample(sample_id="a", unit=0, token_ids=tokens, loss_mask=mask, positions=np.zeros(shape, np.int32))


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_training_sample_positions_have_one_axis_or_three(shape: tuple[int, ...]) -> None:
    positions = np.zeros(shape, np.int32)
    sample = TrainingSample(
        sample_id="a", unit=0, token_ids=np.arange(4), loss_mask=np.ones(4, np.bool_), positions=positions
    )
    assert sample.positions is positions
