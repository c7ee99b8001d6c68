"""Peers in processes of their own, shared by the tests of this room; and the path of `weight_helpers`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from weight_helpers import Peer


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    """Two engine processes; both are ended, whatever a test did to them."""
    started = [Peer(), Peer()]
    yield [peer.ready() for peer in started]
    for peer in started:
        peer.kill()


@pytest.fixture
def lone_peer() -> Iterator[Peer]:
    """A process that the test may kill."""
    peer = Peer()
    yield peer.ready()
    peer.kill()
