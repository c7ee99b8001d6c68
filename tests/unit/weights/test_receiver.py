import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from weight_helpers import TENSORS, offer, same_bytes

from roll.errors import ConfigError, WeightSyncError
from roll.types import TensorSpec, WeightUpdate
from roll.weights import Sender, compute_checksum, open_update

THREE = {"a": torch.ones(2, 3), "b": torch.zeros(4), "c": torch.full((2,), 7.0)}


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.close()


def announced(update: WeightUpdate, **changed: TensorSpec | None) -> WeightUpdate:
    """The same offer with another manifest: as if the transport had brought something else."""
    specs = [changed.get(spec.name, spec) for spec in update.manifest]
    return replace(update, manifest=tuple(spec for spec in specs if spec is not None))


def test_weight_receiver_tensors_arrive_bit_for_bit_with_their_checksums(sender: Sender):
    update = pickle.loads(pickle.dumps(offer(TENSORS, sender)))
    with open_update(update) as receiver:
        arrived = [(name, tensor.clone()) for name, tensor in receiver]
    assert [name for name, _ in arrived] == list(TENSORS)
    assert all(same_bytes(tensor, TENSORS[name]) for name, tensor in arrived)
    assert receiver.checksums == {name: compute_checksum(tensor) for name, tensor in TENSORS.items()}
    assert receiver.checksums == sender.send()
    assert receiver.num_bytes == sum(t.numel() * t.element_size() for t in TENSORS.values())
    assert receiver.unread_names == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"b": TensorSpec(name="b", shape=(2, 2), dtype="float32")}, r"'b' has shape \(4,\), expected \(2, 2\)"),
        ({"b": TensorSpec(name="b", shape=(4,), dtype="bfloat16")}, "'b' has dtype float32, expected bfloat16"),
        ({"b": None}, "'b' is unexpected: it is not in the manifest"),
        ({"c": None}, "'c' is unexpected: the last tensor of the manifest was received before it"),
        ({"b": TensorSpec(name="x", shape=(4,), dtype="float32")}, "'b' is unexpected"),
    ],
)
def test_weight_receiver_what_differs_from_the_manifest_is_named(sender: Sender, changed: dict, message: str):
    update = announced(offer(THREE, sender), **changed)
    with pytest.raises(WeightSyncError, match=f"policy version 1: tensor {message}"), open_update(update) as receiver:
        list(receiver)


@pytest.mark.parametrize(
    ("dropped", "message"), [("b", "'b' is missing: received 'c' instead"), ("c", "'c' is missing: the")]
)
def test_weight_receiver_a_tensor_lost_on_the_way_is_named(sender: Sender, dropped: str, message: str):
    whole = offer(THREE, sender)
    sender.release()
    part = offer({name: tensor for name, tensor in THREE.items() if name != dropped}, sender)
    with (
        pytest.raises(WeightSyncError, match=message),
        open_update(replace(part, manifest=whole.manifest)) as receiver,
    ):
        list(receiver)


def test_weight_receiver_a_tensor_that_comes_twice_is_named(sender: Sender):
    update = offer(THREE, sender)
    specs = (update.manifest[0], replace(update.manifest[1], name="a2"), update.manifest[2])
    from roll.weights import in_process

    in_process._staged_tensors[update.handle].insert(1, ("a", THREE["a"]))
    with (
        pytest.raises(WeightSyncError, match="'a' is unexpected: it was received twice"),
        open_update(replace(update, manifest=specs)) as receiver,
    ):
        list(receiver)


def test_weight_receiver_an_engine_that_leaves_tensors_unread_is_told_which(sender: Sender):
    with (
        pytest.raises(WeightSyncError, match="did not read 2 of 3 tensors: 'b', 'c'"),
        open_update(offer(THREE, sender)) as receiver,
    ):
        next(iter(receiver))


def test_weight_receiver_the_engines_own_error_is_passed_on_as_it_is(sender: Sender):
    with pytest.raises(KeyError, match="boom"), open_update(offer(THREE, sender)) as receiver:
        for _ in receiver:
            raise KeyError("boom")


def test_weight_receiver_a_released_offer_is_refused(sender: Sender):
    update = offer(THREE, sender)
    sender.release()
    with pytest.raises(WeightSyncError, match="released already"), open_update(update):
        pass


def test_weight_receiver_an_offer_of_another_process_is_refused_with_advice(sender: Sender):
    update = offer(THREE, sender)
    update = replace(update, handle=replace(update.handle, process_id=1))
    with (
        pytest.raises(WeightSyncError, match=r"staged in process 1, .* use shared_memory or broadcast"),
        open_update(update),
    ):
        pass


def test_weight_receiver_an_unknown_transport_is_refused_with_the_known_ones(sender: Sender):
    with pytest.raises(ConfigError, match="in_process"):
        sender.stage(None, 1, "pigeon")  # type: ignore[arg-type]
    with (
        pytest.raises(ConfigError, match="shared_memory"),
        open_update(replace(offer(THREE, sender), transport="shared_mem")),
    ):
        pass


def test_weight_receiver_a_rank_without_tensors_makes_no_offer_and_sends_nothing(sender: Sender):
    nothing = dict.fromkeys(THREE)
    for transport in ("in_process", "shared_memory", "broadcast"):
        from weight_helpers import DictSource

        assert sender.stage(DictSource(nothing), 1, transport) is None  # type: ignore[arg-type]
        assert sender.send() == {}
        sender.release()
