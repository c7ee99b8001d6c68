"""Tensors through real processes: what arrives, what is left behind, and what happens when an end dies."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weight_helpers import TENSORS, DictSource, Peer, same_bytes, send_aside, transfer

from roll.errors import WeightSyncError
from roll.weights import Sender, broadcast, compute_checksum, in_process, open_update
from roll.weights.authenticated_store import AuthenticatedStore
from roll.weights.broadcast import build_engine_update
from roll.weights.plan import plan_buckets

pytestmark = pytest.mark.integration

SMALL_BUCKETS = 200
"""Bytes: `TENSORS` then travels in several buckets, some with several tensors, some with one that is too large."""


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender(bucket_bytes=SMALL_BUCKETS, timeout_s=20)
    yield sender
    sender.close()


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
def test_weight_transport_every_kind_of_tensor_reaches_two_processes_sync_after_sync(
    transport: str, sender: Sender, peers: list[Peer]
):
    for version in (1, 2, 3):
        tensors = {name: tensor * version if name == "large" else tensor for name, tensor in TENSORS.items()}
        checksums, answers = transfer(sender, tensors, transport, peers, version)
        assert checksums == {name: compute_checksum(tensor) for name, tensor in tensors.items()}
        for taken, found in answers:
            assert found == checksums
            assert all(same_bytes(tensor, tensors[name]) for name, tensor in taken)
            assert [name for name, _ in taken] == list(tensors)


def test_weight_transport_one_group_serves_many_syncs_and_a_new_one_a_changed_membership(
    sender: Sender, peers: list[Peer]
):
    def group_key() -> str:
        return sender._outgoing["broadcast"]._group.key  # type: ignore[attr-defined]

    keys = []
    for members in (peers, peers, peers[:1], peers[:1], peers):
        _, answers = transfer(sender, TENSORS, "broadcast", members)
        assert len(answers) == len(members)
        keys.append(group_key())
    assert keys[0] == keys[1]
    assert keys[2] == keys[3]
    assert len(set(keys)) == 3


arrays = st.tuples(
    st.lists(st.integers(0, 6), max_size=3),
    st.sampled_from([torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.uint8]),
    st.booleans(),
)


def build(shape: list[int], dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    count = torch.Size(shape).numel()
    tensor = (torch.arange(count) % 251).to(dtype).reshape(shape)
    return tensor.mT if transposed and len(shape) >= 2 else tensor


described_tensors = st.dictionaries(st.text(min_size=1, max_size=8), arrays, min_size=1, max_size=12)
any_test = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def check_round_trip(described: dict, bucket_bytes: int, transport: str) -> None:
    tensors = {name: build(*description) for name, description in described.items()}
    sender = Sender(bucket_bytes=bucket_bytes, timeout_s=20)
    try:
        update = sender.stage(DictSource(tensors), 1, transport)
        assert update is not None
        sending = send_aside(sender)
        with open_update(update, timeout_s=20) as receiver:
            taken = {name: tensor.clone() for name, tensor in receiver}
        assert sending.result() == receiver.checksums
        sender.release()
        assert list(taken) == list(tensors)
        assert all(same_bytes(taken[name], tensors[name]) for name in tensors)
    finally:
        sender.close()


@settings(max_examples=60, **any_test)
@given(described_tensors, st.sampled_from(["in_process", "shared_memory"]))
def test_weight_transport_any_tensors_arrive_bit_for_bit(described: dict, transport: str):
    check_round_trip(described, 1, transport)


@settings(max_examples=8, **any_test)
@given(described_tensors, st.integers(1, 2000))
def test_weight_transport_any_tensors_in_any_buckets_are_broadcast_bit_for_bit(described: dict, bucket_bytes: int):
    check_round_trip(described, bucket_bytes, "broadcast")


def flip_byte(update, name: str) -> None:
    """Change one bit of one tensor in the sender's memory file."""
    (bucket,) = plan_buckets(update.manifest, 2**63)
    slot = next(slot for slot in bucket.slots if slot.spec.name == name)
    descriptor = os.open(f"/proc/{update.handle.process_id}/fd/{update.handle.descriptor}", os.O_RDWR)
    (byte,) = os.pread(descriptor, 1, slot.offset)
    os.pwrite(descriptor, bytes([byte ^ 4]), slot.offset)
    os.close(descriptor)


def test_weight_transport_a_byte_that_changes_on_the_way_changes_that_tensors_checksum_alone(sender: Sender):
    update = sender.stage(DictSource(TENSORS), 1, "shared_memory")
    assert update is not None
    flip_byte(update, "transposed")
    with open_update(update) as receiver:
        list(receiver)
    sent = sender.send()
    assert [name for name in sent if sent[name] != receiver.checksums[name]] == ["transposed"]


def test_weight_transport_a_receiver_cannot_change_the_senders_memory(sender: Sender):
    update = sender.stage(DictSource(TENSORS), 1, "shared_memory")
    assert update is not None
    with open_update(update) as receiver:
        for _, tensor in receiver:
            tensor.zero_()
    with open_update(update) as receiver:
        list(receiver)
    assert receiver.checksums == sender.send()


def test_weight_transport_a_smaller_model_in_a_kept_memory_file_arrives_whole(sender: Sender, peers: list[Peer]):
    for tensors in (TENSORS, {"only": torch.arange(3.0)}, TENSORS):
        checksums, ((_, found),) = transfer(sender, tensors, "shared_memory", peers[:1])
        assert found == checksums


def test_weight_transport_a_killed_sender_leaves_no_shared_memory_and_its_offer_is_refused(lone_peer: Peer):
    lone_peer.tell("stage", TENSORS, "shared_memory", None)
    update = lone_peer.answer()
    with open_update(update) as receiver:
        list(receiver)
    opened = [os.readlink(entry) for entry in Path(f"/proc/{lone_peer.process.pid}/fd").iterdir()]
    assert "/memfd:roll-weights (deleted)" in opened, "the only memory has no name, so the kernel frees it"
    assert not [path for path in opened if path.startswith("/dev/shm")]
    lone_peer.kill()
    with pytest.raises(WeightSyncError, match="cannot be opened: the trainer has ended"), open_update(update):
        pass


def test_weight_transport_memory_of_another_than_the_offering_process_is_refused(sender: Sender):
    update = sender.stage(DictSource(TENSORS), 1, "shared_memory")
    assert update is not None
    stranger = replace(update, handle=replace(update.handle, inode=update.handle.inode + 1))
    with pytest.raises(WeightSyncError, match="the trainer was restarted"), open_update(stranger):
        pass
    longer = replace(update, handle=replace(update.handle, num_bytes=2**40))
    with pytest.raises(WeightSyncError, match="expected 1099511627776"), open_update(longer):
        pass


def test_weight_transport_a_failed_sync_lets_the_memory_file_go(sender: Sender):
    update = sender.stage(DictSource(TENSORS), 1, "shared_memory")
    assert update is not None
    sender.release(failed=True)
    with pytest.raises(WeightSyncError, match="cannot be opened"), open_update(update):
        pass


LONG = {f"layer {i}": torch.full((20_000,), float(i)) for i in range(200)}
"""16 MB in buckets of one tensor: an end that stops early leaves the others in the middle."""


@pytest.mark.parametrize("how", ["die", "fail"])
def test_weight_transport_an_engine_lost_in_a_broadcast_ends_it_for_all_and_the_next_one_works(
    how: str, sender: Sender, peers: list[Peer], lone_peer: Peer
):
    update = sender.stage(DictSource(LONG), 1, "broadcast")
    assert update is not None
    ids = ("engine-0", "engine-1")
    peers[0].tell("receive", build_engine_update(update, ids[0], ids), {"timeout_s": 20.0}, None)
    command = "fail" if how == "fail" else "receive"
    lone_peer.tell(command, build_engine_update(update, ids[1], ids), {"timeout_s": 20.0}, 3)
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match="the trainer or an engine aborted the broadcast"):
        sender.send()
    sender.release(failed=True)
    survivor = peers[0].answer()
    assert isinstance(survivor, WeightSyncError)
    assert "engine 'engine-0': the trainer or an engine aborted the broadcast" in str(survivor)
    assert time.monotonic() - begin < 15, "noticed by the closed connection, not by the time limit"
    if how == "fail":
        assert "the engine refuses layer 3" in str(lone_peer.answer())
    checksums, answers = transfer(sender, TENSORS, "broadcast", peers)
    assert all(found == checksums for _, found in answers)


def test_weight_transport_a_trainer_killed_in_a_broadcast_is_noticed_by_its_engine(lone_peer: Peer):
    lone_peer.tell("stage", LONG, "broadcast", 20)
    update = lone_peer.answer()
    lone_peer.tell("send")
    with (
        pytest.raises(WeightSyncError, match="engine 'engine': the trainer or an engine aborted the broadcast"),
        open_update(update, timeout_s=20) as receiver,
    ):
        list(receiver)
    assert 0 < len(receiver.checksums) <= 20
    with pytest.raises(WeightSyncError, match="cannot reach the trainer at"), open_update(update, timeout_s=0.2):
        pass


def test_weight_transport_an_engine_does_not_wait_for_ever_for_a_trainer(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(  # it may be slow to come to the meeting
        broadcast,
        "AuthenticatedStore",
        lambda *place, timeout: AuthenticatedStore(*place, timeout=timedelta(seconds=20)),
    )
    update = sender.stage(DictSource(TENSORS), 1, "broadcast")
    assert update is not None
    with (
        pytest.raises(WeightSyncError, match=r"the trainer did not begin to send within 0\.2 s"),
        open_update(update, timeout_s=0.2),
    ):
        pass


class CountingSource(DictSource):
    num_yielded = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for item in self.tensors.items():
            self.num_yielded += 1
            yield item


def test_weight_transport_a_sender_names_the_engine_that_does_not_come(peers: list[Peer]):
    source = CountingSource(TENSORS)
    sender = Sender(timeout_s=1.0)
    update = sender.stage(source, 1, "broadcast")
    assert update is not None
    ids = ("here", "gone")
    peers[0].tell("receive", build_engine_update(update, "here", ids), {"timeout_s": 20.0}, None)
    handle = update.handle
    store = AuthenticatedStore(handle.host, handle.port, handle.secret, timeout=timedelta(seconds=20))
    dist.PrefixStore(handle.sync, store).wait(["hello/1"], timedelta(seconds=20))
    with pytest.raises(WeightSyncError, match=r"engine 'gone' did not join within 1 s"):
        sender.send()
    sender.release(failed=True)
    assert "the trainer aborted the sync" in str(peers[0].answer())
    assert source.num_yielded == 2 * len(TENSORS), "other ranks iterate too and would wait for this one"
    sender.close()
    with pytest.raises(WeightSyncError, match="no weights are staged"):
        sender.send()


def test_weight_transport_a_release_ends_a_send_that_waits(sender: Sender):
    assert sender.stage(DictSource(TENSORS), 1, "broadcast") is not None
    sending = send_aside(sender)
    sender.release(failed=True)
    with pytest.raises(WeightSyncError, match="aborted before every engine had joined"):
        sending.result(timeout=10)


def test_weight_transport_a_sync_that_is_given_up_before_it_is_sent_goes_through_all_weights(sender: Sender):
    source = CountingSource(TENSORS)
    assert sender.stage(source, 1, "broadcast") is not None
    sender.release(failed=True)
    seen = source.num_yielded
    with pytest.raises(WeightSyncError, match="aborted"):
        sender.send()
    assert source.num_yielded == seen + len(TENSORS), "other ranks may have begun, and would wait for this one"


class GivenUpSource(DictSource):
    """As its second tensor is gathered, another thread gives the sync up, and others open files."""

    def __init__(self, sender: Sender, directory: Path) -> None:
        super().__init__({str(i): torch.ones(100) for i in range(20)})
        self.sender, self.directory = sender, directory
        self.files: list[BinaryIO] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, found in enumerate(super().__iter__()):
            if number == 1:
                self.sender.release(failed=True)
                self.files = [(self.directory / str(i)).open("wb") for i in range(4)]
            yield found


@pytest.mark.parametrize("transport", ["shared_memory", "in_process"])
def test_weight_transport_weight_sync_that_is_given_up_while_it_is_staged_writes_into_no_other_file_and_keeps_nothing(
    sender: Sender, tmp_path: Path, transport: str
):
    source = GivenUpSource(sender, tmp_path)
    with pytest.raises(WeightSyncError, match="policy version 1: the sync was aborted while weights were being staged"):
        sender.stage(source, 1, transport)
    for file in source.files:
        file.close()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0] * 4
    assert not in_process._staged_tensors
    before = len(os.listdir("/proc/self/fd"))
    assert sender.stage(DictSource(TENSORS), 2, transport) is not None
    sender.release(failed=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_weight_transport_shared_memory_that_is_full_lets_the_other_ranks_end(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
):
    def full(descriptor: int, data: object, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("roll.weights.shared_memory.os.pwrite", full)
    source = CountingSource({f"{i}/{name}": tensor for i in range(20) for name, tensor in TENSORS.items()})
    with pytest.raises(OSError, match="No space left"):
        sender.stage(source, 1, "shared_memory")
    assert source.num_yielded == len(source.tensors)


def test_weight_transport_a_source_that_changes_under_the_same_names_is_refused(sender: Sender, peers: list[Peer]):
    transfer(sender, {"a": torch.zeros(3)}, "broadcast", peers[:1])
    with pytest.raises(WeightSyncError, match=r"manifest has .*shape=\(3,\).* sent .*shape=\(4,\)"):
        transfer(sender, {"a": torch.zeros(4)}, "broadcast", peers[:1])
    assert isinstance(peers[0].answer(), WeightSyncError)
