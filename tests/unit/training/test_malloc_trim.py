"""Free memory of the heap is given back when there is too much of it, and not before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from roll.training.memory import malloc_trim
from roll.training.memory.malloc_trim import Heap, trim_heap_after_layers

BESIDES = 50


class Library:
    """A C library of whose memory so many bytes are alive, and so many lie free in the process."""

    def __init__(self) -> None:
        self.alive, self.free, self.num_trims = 800, 70, 0
        self.mapped = 300

    def mallinfo2(self) -> SimpleNamespace:
        return SimpleNamespace(uordblks=self.alive - self.mapped, hblkhd=self.mapped)

    def malloc_trim(self, pad: int) -> None:
        assert pad == 0
        self.free, self.num_trims = 0, self.num_trims + 1


@pytest.fixture(name="library")
def _library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(malloc_trim, "_read_anonymous_bytes", lambda: BESIDES + library.alive + library.free)
    monkeypatch.setattr(malloc_trim, "_load_glibc", lambda: library)
    return library


def test_malloc_trim_an_eighth_of_what_is_alive_may_lie_free(library: Library) -> None:
    found = Heap(library)
    assert (library.free, library.num_trims) == (0, 1)  # what loading left
    library.free = 100
    assert not found.trim_if_fragmented()
    library.free = 101
    assert found.trim_if_fragmented()
    assert (library.free, library.num_trims) == (0, 2)


def test_malloc_trim_what_a_pass_let_go_of_stays_for_the_next_one(library: Library) -> None:
    found = Heap(library)
    library.alive = 1600
    assert not found.trim_if_fragmented()
    library.alive, library.free = 800, 900  # after the backward pass
    assert not found.trim_if_fragmented()
    library.alive, library.free = 1600, 201
    assert found.trim_if_fragmented()


def test_malloc_trim_what_was_mapped_by_itself_leaves_no_room_for_holes(library: Library) -> None:
    found = Heap(library)
    library.mapped = 1100
    library.alive += 800
    assert not found.trim_if_fragmented()
    library.mapped = 300
    library.alive, library.free = 800, 201
    assert found.trim_if_fragmented()


def test_malloc_trim_layers_whose_gradient_is_wanted_are_looked_after(library: Library) -> None:
    layer = nn.Linear(2, 2)
    trim_heap_after_layers([layer])
    library.free = 1000
    with torch.no_grad():
        layer(torch.ones(2))
    assert library.num_trims == 1
    layer(torch.ones(2))
    assert library.num_trims == 2


def test_malloc_trim_nothing_lies_free_where_large_logits_follow(library: Library) -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    library.alive = 1600
    trim_heap_after_layers([first, last])
    first(torch.ones(2))
    library.alive, library.free = 800, 201
    first(torch.ones(2))
    assert library.num_trims == 1
    last(torch.ones(2))
    assert library.num_trims == 2


def test_malloc_trim_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc_trim, "_load_glibc", lambda: None)
    layer = nn.Linear(2, 2)
    assert trim_heap_after_layers([layer]) is None
    assert not layer._forward_hooks


def test_malloc_trim_nothing_lies_free_where_the_gradient_of_embeddings_follows(library: Library) -> None:
    embeddings, layer = nn.Embedding(4, 2), nn.Linear(2, 2)
    library.alive = 1600
    trim_heap_after_layers([layer, nn.Linear(2, 2)], embeddings)
    output = layer(embeddings(torch.tensor([1])))
    library.alive, library.free = 800, 201
    assert library.num_trims == 1
    output.sum().backward()
    assert library.num_trims == 2


def test_malloc_trim_this_processes_memory_is_read_where_the_c_library_is_glibc() -> None:
    if malloc_trim._load_glibc() is None:
        pytest.skip("another C library")
    found = Heap(malloc_trim._load_glibc())
    before = sum(found._measure_bytes_in_use())
    tensor = torch.ones(2**23)
    assert sum(found._measure_bytes_in_use()) - before > 0.9 * tensor.nbytes  # other threads let go of something
    assert malloc_trim._read_anonymous_bytes() > tensor.nbytes
