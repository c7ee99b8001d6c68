import struct

import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from roll.weights import checksum as checksum_module
from roll.weights import compute_checksum

floats = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50)


def test_weight_checksum_it_is_xxh3_of_the_elements_in_row_major_order():
    assert compute_checksum(torch.tensor([[1.0, 2.0], [3.0, 4.0]])) == xxhash.xxh3_64_intdigest(
        struct.pack("<4f", 1, 2, 3, 4)
    )


def test_weight_checksum_a_bfloat16_one_is_the_upper_half_of_a_float32_one():
    assert compute_checksum(torch.tensor([1.0], dtype=torch.bfloat16)) == xxhash.xxh3_64_intdigest(b"\x80\x3f")


def test_weight_checksum_an_empty_tensor_has_the_checksum_of_no_bytes():
    assert compute_checksum(torch.empty(3, 0)) == xxhash.xxh3_64_intdigest(b"")


@given(floats)
def test_weight_checksum_strides_do_not_matter(values: list[float]):
    plain = torch.tensor(values)
    spread = torch.stack([plain, -plain], dim=1)[:, 0]
    assert not spread.is_contiguous() or len(values) == 1
    assert compute_checksum(spread) == compute_checksum(plain)


@given(floats, st.data())
def test_weight_checksum_one_changed_bit_changes_it(values: list[float], data: st.DataObject):
    tensor = torch.tensor(values)
    changed = tensor.clone()
    bit = data.draw(st.integers(0, 32 * len(values) - 1))
    changed.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert compute_checksum(changed) != compute_checksum(tensor)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=50, unique=True))
def test_weight_checksum_it_depends_on_the_places_of_values(values: list[int]):
    tensor = torch.tensor(values, dtype=torch.int32)
    assert compute_checksum(tensor.flip(0)) != compute_checksum(tensor)


def test_weight_checksum_hashing_piece_by_piece_as_from_a_device_gives_the_same_value(monkeypatch):
    class OffHost:
        """A tensor's bytes that claim to lie on a device."""

        def __init__(self, data: torch.Tensor) -> None:
            self.data, self.device = data, torch.device("cuda")

        def numel(self) -> int:
            return self.data.numel()

        def __getitem__(self, piece: slice) -> torch.Tensor:
            return self.data[piece]

    tensor = torch.arange(1000.0)
    expected = compute_checksum(tensor)
    monkeypatch.setattr(checksum_module, "DEVICE_CHUNK_BYTES", 700)
    monkeypatch.setattr(checksum_module, "to_flat_bytes", lambda t: OffHost(t.reshape(-1).view(torch.uint8)))
    assert compute_checksum(tensor) == expected
