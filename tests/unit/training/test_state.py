"""A trainer that was saved and loaded goes on bit for bit; corrupted or foreign checkpoints are refused."""

from __future__ import annotations

import contextlib
import errno
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from training_helpers import logprobs_of, make_batch, make_spec
from worlds.tiny_model import write_tiny_model

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.errors import CheckpointError
from roll.training import TorchBackend
from roll.training.checkpoint import writer as state_writer
from roll.training.checkpoint.reader import SafeReader

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "schedule": "cosine", "warmup_steps": 1},
    "bfloat16": {"dtype": "bfloat16", "schedule": "linear"},
    "lora with dropout": {"dtype": "bfloat16", "lora": LoRAConfig(rank=2, dropout=0.3)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_trainer_state_two_steps_and_two_after_resuming_equal_four(tiny_model: Path, tmp_path: Path, name: str) -> None:
    batches = [make_batch(seed) for seed in range(4)]
    straight = TorchBackend(make_spec(tiny_model, **SETTINGS[name]))
    expected = [straight.train_step(batch, PolicyLoss()) for batch in batches]

    first = TorchBackend(make_spec(tiny_model, **SETTINGS[name]))
    for batch in batches[:2]:
        first.train_step(batch, PolicyLoss())
    first.save(tmp_path / "trainer")
    torch.rand(5)  # randomness used between saving and loading must not matter
    second = TorchBackend(make_spec(tiny_model, **SETTINGS[name]))
    second.load(tmp_path / "trainer")
    found = [second.train_step(batch, PolicyLoss()) for batch in batches[2:]]

    for a, b in zip(found, expected[2:], strict=True):
        assert (a.loss, a.grad_norm, a.learning_rate) == (b.loss, b.grad_norm, b.learning_rate)
        assert a.metrics == b.metrics
    for weight in straight.masters.parameters:
        assert torch.equal(second.masters.get_full(weight), straight.masters.get_full(weight))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(second.weights(), straight.weights(), strict=True))


def test_trainer_state_a_fresh_trainer_can_be_saved_and_loaded(tiny_model: Path, tmp_path: Path) -> None:
    backend = TorchBackend(make_spec(tiny_model))
    backend.save(tmp_path / "trainer")
    backend.train_step(make_batch(), PolicyLoss())
    backend.load(tmp_path / "trainer")
    assert backend.num_steps == 0
    fresh = TorchBackend(make_spec(tiny_model))
    results = [b.train_step(make_batch(1), PolicyLoss()) for b in (backend, fresh)]
    assert results[0].loss == results[1].loss
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(backend.weights(), fresh.weights(), strict=True))


def test_trainer_state_loading_leaves_the_networks_copy_equal_to_the_masters(tiny_model: Path, tmp_path: Path) -> None:
    backend = TorchBackend(make_spec(tiny_model, dtype="bfloat16"))
    backend.train_step(make_batch(), PolicyLoss())
    expected = logprobs_of(backend, make_batch(3))
    backend.save(tmp_path / "trainer")
    other = TorchBackend(make_spec(tiny_model, dtype="bfloat16"))
    other.load(tmp_path / "trainer")
    assert all((a == b).all() for a, b in zip(logprobs_of(other, make_batch(3)), expected, strict=True))


def test_trainer_state_a_checkpoint_of_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    TorchBackend(make_spec(tiny_model)).save(tmp_path / "trainer")
    deeper = TorchBackend(make_spec(write_tiny_model(tmp_path / "deeper", layers=3)))
    with pytest.raises(CheckpointError, match="belongs to another model"):
        deeper.load(tmp_path / "trainer")
    wider = TorchBackend(make_spec(write_tiny_model(tmp_path / "wider", hidden=64)))
    with pytest.raises(CheckpointError, match="tensors with other shapes"):
        wider.load(tmp_path / "trainer")


DAMAGE: list[tuple[str, dict[str, torch.Tensor], str]] = [
    ("below zero", {"counters": torch.tensor([0, -5])}, "the count of 'num_steps' is -5"),
    ("no number", {"counters": torch.full((2,), torch.nan)}, "'counters' has dtype torch.float32"),
    ("beyond any run", {"updates": torch.full((20,), 2**62)}, f"the count of 'model.* is {2**62}"),
    (
        "no generator",
        {"rng/0/cpu": torch.zeros(5056, dtype=torch.uint8)},
        r"random states \['rng/0/cpu'\] are not valid: Invalid mt19937",
    ),
    ("whole", {"weight/model.norm.weight": torch.ones(32, dtype=torch.int64)}, "norm.weight' has dtype torch.int64"),
]


@pytest.mark.parametrize(("instead", "says"), [each[1:] for each in DAMAGE], ids=[each[0] for each in DAMAGE])
def test_trainer_state_numbers_that_no_trainer_writes_are_refused(
    tiny_model: Path, tmp_path: Path, instead: dict[str, torch.Tensor], says: str
) -> None:
    """Each would end a later step, or change it."""
    backend, generator = TorchBackend(make_spec(tiny_model)), torch.get_rng_state()
    backend.save(tmp_path / "trainer")
    reader = SafeReader(tmp_path / "trainer")
    saved: Any = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    dcp.save(state | instead, storage_writer=dcp.FileSystemWriter(tmp_path / "corrupted"), no_dist=True)
    with pytest.raises(CheckpointError, match=says):
        backend.load(tmp_path / "corrupted")
    assert torch.equal(torch.get_rng_state(), generator)


def test_trainer_state_missing_and_corrupted_checkpoints_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    backend = TorchBackend(make_spec(tiny_model))
    with pytest.raises(CheckpointError, match="cannot be read"):
        backend.load(tmp_path / "nothing")
    backend.save(tmp_path / "trainer")
    (data,) = (tmp_path / "trainer").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"trainer' cannot be read: \w+Error on rank 0(: [^\n]+)?\Z"):
        backend.load(tmp_path / "trainer")
    data.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read: FileNotFoundError on rank 0: [^\n]+\Z"):
        backend.load(tmp_path / "trainer")


def test_trainer_state_a_state_written_while_training_goes_on_is_that_of_the_step_it_began_at(
    tiny_model: Path, tmp_path: Path
) -> None:
    backend = TorchBackend(make_spec(tiny_model, dtype="bfloat16"))
    backend.train_step(make_batch(), PolicyLoss())
    backend.save(tmp_path / "at once")
    backend.save(tmp_path / "meanwhile", background=True)
    backend.train_step(make_batch(1), PolicyLoss())
    assert backend.is_save_written(wait=True)
    found = []
    for name in ("at once", "meanwhile"):
        backend.load(tmp_path / name)
        assert backend.num_steps == 1
        found.append({n: backend.masters.get_full(n).clone() for n in backend.masters.parameters})
        moments = backend.optimizer.get_moments().items()
        found[-1] |= {f"{n}/{part}": tensor.clone() for n, parts in moments for part, tensor in parts.items()}
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_trainer_state_a_state_that_cannot_be_written_in_the_background_is_said_once(
    tiny_model: Path, tmp_path: Path
) -> None:
    backend = TorchBackend(make_spec(tiny_model))
    (tmp_path / "file").touch()
    backend.save(tmp_path / "file" / "state", background=True)
    with pytest.raises((CheckpointError, OSError), match="file"):
        backend.is_save_written(wait=True)
    assert backend.is_save_written(wait=True)
    backend.save(tmp_path / "state", background=True)
    assert backend.is_save_written(wait=True)
    backend.load(tmp_path / "state")


def test_trainer_state_a_disk_that_is_full_is_named_wherever_it_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TorchBackend(make_spec(tiny_model))
    plain = FileSystem.create_stream

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() > 20_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    @contextlib.contextmanager
    def small(self: Any, path: Any, mode: str) -> Any:
        if mode == "rb":
            with plain(self, path, mode) as file:
                yield file
        else:
            with Full(path, mode) as file:
                yield file

    monkeypatch.setattr(FileSystem, "create_stream", small)
    for background in (False, True):
        with pytest.raises(OSError, match="No space left on device"):  # of `torch.save`, whose own error hides it
            backend.save(tmp_path / "state", background=background)
            backend.is_save_written(wait=True)


def test_trainer_state_a_state_of_which_there_is_no_room_for_a_copy_is_not_written(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TorchBackend(make_spec(tiny_model))
    with monkeypatch.context() as patch:
        patch.setattr(state_writer, "_copy_to_host", lambda tensor: [][0])
        with pytest.raises(CheckpointError, match="rank 0 cannot copy its state: IndexError"):
            backend.save(tmp_path / "state", background=True)
    assert backend.is_save_written(wait=True)
    assert not (tmp_path / "state").exists()
    backend.save(tmp_path / "state", background=True)
    assert backend.is_save_written(wait=True)
    backend.load(tmp_path / "state")
