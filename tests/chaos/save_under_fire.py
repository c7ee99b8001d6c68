"""Saves checkpoints in forked children that are killed at every write, fsync and rename, one after the other.

Run with the kill switch preloaded: `LD_PRELOAD=killswitch.so python save_under_fire.py MODEL DIRECTORY
[EVERY [asynchronous] [failing]]`. `asynchronous` writes while training goes on. With `failing`, nothing is killed: that
one call fails as on a bad disk, which must be one message of ROLL's, and the same step is saved once more.
Prints the number of calls that a save makes, and how many moments were tried. Exits with 1 where a checkpoint was
lost.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from roll.algorithms.losses import PolicyLoss, ValueLoss
from roll.cluster.local import LocalTrainerGroup
from roll.config.model import ModelConfig
from roll.config.operations import CheckpointConfig
from roll.config.training import TrainingConfig
from roll.errors import RollError
from roll.pipelines.checkpoint_files import UNFINISHED_PREFIX, find_checkpoint, read_checkpoint, remove_unfinished
from roll.pipelines.checkpointer import Checkpointer
from roll.pipelines.state import RunState
from roll.protocols import LossFn
from roll.rollout import DataLedger
from roll.tracking import RunDirectory
from roll.training import Role, TorchBackend, TrainerSpec, rank
from roll.types import TrainingBatch, TrainingSample

logger = logging.getLogger(__name__)

ASYNCHRONOUS, FAILING = ("asynchronous" in sys.argv), ("failing" in sys.argv)


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
    """A checkpoint, and where it is written asynchronously, another step of training meanwhile; again if it fails."""
    try:
        await checkpointer.save(RunState(step=step), DataLedger())
        if checkpointer.config.asynchronous:
            await policy.train_step(batch(), PolicyLoss())
            await checkpointer.publish_pending(wait=True)
    except RollError as error:
        print(f"said: {error}")
        await checkpointer.save(RunState(step=step), DataLedger())
        await checkpointer.publish_pending(wait=True)


def save(run: RunDirectory, policy: TorchBackend, critic: TorchBackend, step: int, kill_at: int) -> int:
    """Save in a forked child, killed or failed at call `kill_at` (0: never); returns its count of calls, -1 if it was
    killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        switch = ctypes.CDLL(None)
        switch.killswitch_count.restype = ctypes.c_long
        with ThreadPoolExecutor(1) as thread:
            trainer, other = (LocalTrainerGroup(each, thread, each.spec) for each in (policy, critic))
            config = CheckpointConfig(keep_last=1, asynchronous=ASYNCHRONOUS)
            checkpointer = Checkpointer(run, config, trainer, [other])
            error = errno.EIO if FAILING else 0
            switch.killswitch_arm(ctypes.c_long(kill_at), str(run.checkpoints_dir).encode(), ctypes.c_int(error))
            try:
                asyncio.run(write(checkpointer, step, trainer))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os.write(writer, str(switch.killswitch_count()).encode())
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        count = answer.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return -1
    assert FAILING or os.WEXITSTATUS(status) == 0, "the child failed without being killed"
    return int(count) if os.WEXITSTATUS(status) == 0 else -1


def main() -> None:
    model, directory = Path(sys.argv[1]), Path(sys.argv[2])
    every = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    torch.set_num_threads(1)
    rank.start_spin_control = lambda: None  # a thread
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
        lost += [f"call {moment}: {problem}" for problem in problems(run, save(run, *trainers, 2, moment), model)]
    print(f"{num_calls} calls, {len(moments)} moments, {len(lost)} losses")
    print("\n".join(lost))
    sys.exit(bool(lost))


def problems(run: RunDirectory, count: int, model: Path) -> Iterator[str]:
    """What is wrong after a save that was killed (`count` is -1) or failed."""
    if (count >= 0) != FAILING:
        yield "an error that is not ROLL's" if FAILING else "the child was not killed"
    if FAILING and list(run.checkpoints_dir.glob(f"{UNFINISHED_PREFIX}step-000002")):
        yield "what was not finished is left over"
    remove_unfinished(run.checkpoints_dir)
    found = find_checkpoint(run.checkpoints_dir)
    if found is None:
        yield "no checkpoint is left"
        return
    if FAILING and found.name != "step-000002":
        yield f"the newest one is {found.name}"
    if problem := loads(found, model):
        yield problem


def loads(path: Path, model: Path) -> str:
    """What keeps a checkpoint from being resumed; empty if nothing does."""
    try:
        saved = read_checkpoint(path, RunState)
        policy, critic = TorchBackend(spec(model, "policy")), TorchBackend(spec(model, "critic"))
        policy.load(saved.trainer_path)
        critic.load(saved.get_critic_path(0))
        assert f"step-{saved.state.step:06d}" == path.name
        assert critic.num_steps == 1
        assert policy.num_steps == 1 or FAILING  # saved again after a step more
        assert (path / "model" / "model.safetensors").stat().st_size > 0
    except Exception as error:
        return f"{path.name}: {error}"
    return ""


if __name__ == "__main__":
    main()
