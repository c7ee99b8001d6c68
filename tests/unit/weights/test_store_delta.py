"""Deltas of the transport `store`: exact for every bit pattern, and small for small steps."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from roll.weights.store.delta import TensorDelta, apply_delta, count_changes, encode_delta, encode_full

DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.float64, torch.bool, torch.complex128]


def to_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1).copy()


def check_round_trip(old: np.ndarray, new: np.ndarray, itemsize: int) -> TensorDelta:
    delta = encode_delta(old, new, itemsize)
    target = old.copy()
    apply_delta(target, delta, itemsize)
    assert np.array_equal(target, new)
    return delta


@st.composite
def byte_versions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Two versions of the bytes of up to 3,000 elements; the new version differs in some elements, in any way."""
    itemsize = draw(st.sampled_from([dtype.itemsize for dtype in DTYPES]))
    count = draw(st.one_of(st.integers(0, 40), st.integers(0, 3000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = rng.integers(0, 256, count * itemsize, dtype=np.uint8)
    new = old.copy().reshape(count, itemsize)
    changed = rng.random(count) < draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]))
    new[changed] = rng.integers(0, 256, (int(changed.sum()), itemsize), dtype=np.uint8)
    return old, new.reshape(-1), itemsize


@given(byte_versions())
def test_store_delta_reconstructs_any_bytes(versions: tuple[np.ndarray, np.ndarray, int]):
    old, new, itemsize = versions
    delta = check_round_trip(old, new, itemsize)
    assert len(delta.payload) <= new.size
    if itemsize <= 8:
        assert delta.num_changed == count_changes(old, new, itemsize)


@given(arrays(np.uint16, st.integers(1, 60)), st.data())
def test_store_delta_reconstructs_nan_payloads_and_signed_zeros(old: np.ndarray, data: st.DataObject):
    special = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0x7F81, 0xFFFF, 0x0001, 0x8001]  # of bfloat16
    new = np.array([data.draw(st.sampled_from(special)) for _ in old], np.uint16)
    check_round_trip(old.view(np.uint8), new.view(np.uint8), 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", [0, 254, 255, 256, 65534, 65535, 65536, 69_999])
def test_store_delta_of_one_element_anywhere(dtype: torch.dtype, position: int):
    old = to_bytes(torch.zeros(70_000, dtype=dtype))
    new = old.copy()
    new[position * dtype.itemsize] ^= 1
    delta = check_round_trip(old, new, dtype.itemsize)
    assert delta.num_changed == 1
    assert len(delta.payload) < 40


@pytest.mark.parametrize(
    ("density", "encoding", "largest_share"), [(0.0, "none", 0.0), (0.01, "gaps8", 0.01), (0.3, "bitmap", 0.2)]
)
def test_store_delta_of_a_small_step_is_small(density: float, encoding: str, largest_share: float):
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 100_000, dtype=np.uint16)
    new = old.copy()
    changed = rng.random(old.size) < density
    new[changed] += rng.choice(np.array([1, 2**16 - 1], np.uint16), int(changed.sum()))  # one unit in the last place
    delta = check_round_trip(old.view(np.uint8), new.view(np.uint8), 2)
    assert delta.encoding == encoding
    assert len(delta.payload) <= largest_share * 2 * old.size


def test_store_delta_is_dense_if_every_element_changes_at_random():
    rng = np.random.default_rng(0)
    old, new = rng.integers(0, 2**16, (2, 1000), dtype=np.uint16)
    delta = check_round_trip(old.view(np.uint8), new.view(np.uint8), 2)
    assert (delta.encoding, len(delta.payload)) == ("dense", 2000)


@pytest.mark.parametrize(
    "delta",
    [
        encode_full(np.zeros(6, np.uint8), 3),
        TensorDelta(encoding="gaps8", num_changed=1, payload=bytes([9, 1, 0])),
        TensorDelta(encoding="gaps8", num_changed=2, payload=bytes([0, 0, 0, 0, 0, 0, 0])),
    ],
    ids=["size", "position", "count"],
)
def test_store_delta_that_does_not_fit_the_tensor_is_rejected(delta: TensorDelta):
    with pytest.raises(ValueError, match=r"bytes for a tensor|positions of"):
        apply_delta(np.zeros(8, np.uint8), delta, 2)
