import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.errors import WeightSyncError
from roll.types import TensorSpec
from roll.weights.plan import ALIGNMENT, compute_num_bytes, compute_total_bytes, describe_tensor, plan_buckets

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, "int8": 1}
specs = st.builds(
    TensorSpec,
    name=st.text(min_size=1, max_size=5),
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
)


def elements(spec: TensorSpec) -> int:
    count = 1
    for size in spec.shape:
        count *= size
    return count


@given(st.lists(specs, max_size=30), st.integers(1, 5000))
def test_weight_sync_plan_every_tensor_has_one_place_in_order_and_no_two_overlap(
    manifest: list[TensorSpec], bucket_bytes: int
):
    buckets = plan_buckets(manifest, bucket_bytes)
    assert [slot.spec for bucket in buckets for slot in bucket.slots] == manifest
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset % ALIGNMENT == 0
            assert slot.offset >= end
            assert slot.num_bytes == elements(slot.spec) * ITEM_BYTES[slot.spec.dtype]
            end = slot.offset + slot.num_bytes
        assert end <= bucket.num_bytes < end + ALIGNMENT
        assert end <= bucket_bytes or len(bucket.slots) == 1


@given(st.lists(specs, max_size=30), st.integers(1, 5000))
def test_weight_sync_plan_a_bucket_ends_only_where_the_next_tensor_does_not_fit(
    manifest: list[TensorSpec], bucket_bytes: int
):
    buckets = plan_buckets(manifest, bucket_bytes)
    for bucket, following in itertools.pairwise(buckets):
        assert bucket.num_bytes + following.slots[0].num_bytes > bucket_bytes


def test_weight_sync_plan_total_bytes_counts_elements_without_gaps():
    manifest = [
        TensorSpec(name="a", shape=(3, 5), dtype="bfloat16"),
        TensorSpec(name="b", shape=(), dtype="float32"),
        TensorSpec(name="c", shape=(0, 9), dtype="float64"),
    ]
    assert compute_total_bytes(manifest) == 30 + 4 + 0


def test_weight_sync_plan_a_spec_speaks_torchs_words():
    assert describe_tensor("w", torch.zeros(2, 3, dtype=torch.bfloat16)) == TensorSpec(
        name="w", shape=(2, 3), dtype="bfloat16"
    )


@pytest.mark.parametrize("dtype", ["float33", "nn", "zeros"])
def test_weight_sync_plan_an_unknown_dtype_is_refused_by_name(dtype: str):
    with pytest.raises(WeightSyncError, match=f"'w' has dtype '{dtype}'"):
        compute_num_bytes(TensorSpec(name="w", shape=(1,), dtype=dtype))
