"""Saves checkpoints in forked children that are killed at every write, fsync and rename, one after the other.

Run with the kill switch preloaded: `LD_PRELOAD=killswitch.so python save_under_fire.py MODEL DIRECTORY
[EVERY [asynchronous]]`; the last writes while training goes on.
Prints the number of calls that a save makes, and how many moments were tried. Exits with 1 where a checkpoint was
lost.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from roll.algorithms.losses import PolicyLoss, ValueLoss
from roll.cluster.local import LocalTrainerGroup
from roll.config.model import ModelConfig
from roll.config.operations import CheckpointConfig
from roll.config.training import TrainingConfig
from roll.pipelines.checkpoint_files import find_checkpoint, read_checkpoint, remove_unfinished
from roll.pipelines.checkpointer import Checkpointer
from roll.pipelines.state import RunState
from roll.protocols import LossFn
from roll.rollout import DataLedger
from roll.tracking import RunDirectory
from roll.training import Role, TorchBackend, TrainerSpec
from roll.types import TrainingBatch, TrainingSample


def trained_backend(model: Path, role: Role, loss: LossFn) -> TorchBackend:
    """A trainer with optimiser state."""
    backend = TorchBackend(spec(model, role))
    backend.train_step(batch(), loss)
    return backend


def batch() -> TrainingBatch:
    """One sample."""
    tokens = np.array([5, 6, 7, 8], np.int32)
    sample = TrainingSample(
        sample_id="0.0",
        unit=0,
        prefix_length=2,
        token_ids=tokens,
        loss_mask=np.array([False, False, True, True]),
        advantages=np.ones(4, np.float32),
        rollout_logprobs=np.zeros(4, np.float32),
        returns=np.ones(4, np.float32),
    )
    return TrainingBatch(samples=(sample,))


def spec(model: Path, role: Role) -> TrainerSpec:
    training = TrainingConfig(num_steps=4, learning_rate=1e-3, num_threads=1)
    config = ModelConfig(path=str(model), dtype="float32")
    return TrainerSpec(model_path=str(model), model=config, training=training, role=role)


async def write(checkpointer: Checkpointer, step: int, policy: LocalTrainerGroup) -> None:
    """A checkpoint, and where it is written asynchronously, another step of training meanwhile."""
    await checkpointer.save(RunState(step=step), DataLedger())
    if checkpointer.config.asynchronous:
        await policy.train_step(batch(), PolicyLoss())
        await checkpointer.settle(wait=True)


def save(run: RunDirectory, policy: TorchBackend, critic: TorchBackend, step: int, kill_at: int) -> int:
    """Save in a forked child, killed at call `kill_at` (0: never); returns its count of calls, -1 if it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        switch = ctypes.CDLL(None)
        switch.killswitch_count.restype = ctypes.c_long
        with ThreadPoolExecutor(1) as thread:
            trainer, other = LocalTrainerGroup(policy, thread), LocalTrainerGroup(critic, thread)
            config = CheckpointConfig(keep_last=1, asynchronous="asynchronous" in sys.argv)
            checkpointer = Checkpointer(run, config, trainer, [other])
            switch.killswitch_arm(ctypes.c_long(kill_at), str(run.checkpoints_dir).encode())
            asyncio.run(write(checkpointer, step, trainer))
            os.write(writer, str(switch.killswitch_count()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        count = answer.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return -1
    assert os.WEXITSTATUS(status) == 0, "the child failed without being killed"
    return int(count)


def main() -> None:
    model, directory = Path(sys.argv[1]), Path(sys.argv[2])
    every = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    torch.set_num_threads(1)
    trainers = trained_backend(model, "policy", PolicyLoss()), trained_backend(model, "critic", ValueLoss())
    assert threading.active_count() == 1, "forking needs a process without threads"
    run = RunDirectory.create(directory, {"name": directory.name})
    save(run, *trainers, 1, 0)
    num_calls = save(run, *trainers, 2, 0)
    lost: list[str] = []
    moments = range(1, num_calls + 1, every)
    for moment in moments:
        shutil.rmtree(run.checkpoints_dir)
        run.checkpoints_dir.mkdir()
        save(run, *trainers, 1, 0)
        killed = save(run, *trainers, 2, moment) == -1
        remove_unfinished(run.checkpoints_dir)
        found = find_checkpoint(run.checkpoints_dir)
        problem = "no checkpoint is left" if found is None else loads(found, model)
        if problem or not killed:
            lost.append(f"call {moment}: {problem or 'the child was not killed'}")
    print(f"{num_calls} calls, {len(moments)} moments, {len(lost)} losses")
    print("\n".join(lost))
    sys.exit(bool(lost))


def loads(path: Path, model: Path) -> str:
    """What keeps a checkpoint from being resumed; empty if nothing does."""
    try:
        saved = read_checkpoint(path, RunState)
        policy, critic = TorchBackend(spec(model, "policy")), TorchBackend(spec(model, "critic"))
        policy.load(saved.trainer_path)
        critic.load(saved.critic_path(0))
        assert f"step-{saved.state.step:06d}" == path.name
        assert policy.num_steps == critic.num_steps == 1
        assert (path / "model" / "model.safetensors").stat().st_size > 0
    except Exception as error:
        return f"{path.name}: {error}"
    return ""


if __name__ == "__main__":
    main()
