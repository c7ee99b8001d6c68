"""Writing checkpoints: atomic, and pruned.

    checkpoints/step-000020/   model/ (HF safetensors)   trainer/ (optimiser, schedule, RNG of every rank)
                               critic-0/ … (as trainer/)   state.json   ledger.jsonl

Invariants:
    - a directory called `step-N` is complete: everything is written under another name, flushed to the disk, and
      renamed;
    - the previous checkpoint is removed only after the new one has its name; so a crash at any moment leaves one whole.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roll.config.operations import CheckpointConfig
from roll.pipelines.saved import UNFINISHED, checkpoints, critic_directory, remove_unfinished
from roll.pipelines.state import RunState
from roll.protocols import TrainerGroup
from roll.rollout.ledger import DataLedger
from roll.tracking import RunDirectory, atomic

__all__ = ["Checkpointer"]


class Checkpointer:
    """Writes and prunes the checkpoints of one run.

    Args:
        run: where they go.
        config: which are written and kept.
        trainer: of the policy.
        critics: whose states are saved beside it.
        on_saved: is told the step and the directory of every new checkpoint.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: CheckpointConfig,
        trainer: TrainerGroup,
        critics: Sequence[TrainerGroup] = (),
        on_saved: Callable[[int, Path], object] | None = None,
    ) -> None:
        self._run = run
        self._config = config
        self._trainer = trainer
        self._critics = tuple(critics)
        self._on_saved = on_saved
        self._saved_step = -1

    def due(self, state: RunState) -> bool:
        """Whether the configuration asks for a checkpoint of this step: by its number, or because it is the best."""
        every = self._config.every_num_steps
        best = self._config.keep_best and state.best_step == state.step > 0
        return best or bool(every and state.step % every == 0)

    async def save(self, state: RunState, ledger: DataLedger) -> Path:
        """Write a checkpoint of this step; one that exists already is left as it is."""
        final = self._run.checkpoint_path(state.step)
        # As they are now: in an asynchronous run rollouts go on while this writes.
        ledger_text, state_json = ledger.dumps(state.num_draws), state.to_json()
        if self._saved_step == state.step or final.is_dir():
            return final
        remove_unfinished(self._run.checkpoints_dir)
        temporary = final.with_name(f"{UNFINISHED}{final.name}")
        temporary.mkdir(parents=True)
        await self._trainer.save(temporary / "trainer")
        for index, critic in enumerate(self._critics):
            await critic.save(temporary / critic_directory(index))
        await self._trainer.export(temporary / "model")
        await asyncio.to_thread(self._finish, temporary, final, state_json, ledger_text)
        await asyncio.to_thread(self._prune, state.best_step)
        self._saved_step = state.step
        if self._on_saved is not None:
            self._on_saved(state.step, final)
        return final

    def _finish(self, temporary: Path, final: Path, state_json: dict[str, Any], ledger_text: str) -> None:
        atomic.write_text(temporary / "ledger.jsonl", ledger_text)
        atomic.write_json(temporary / "state.json", state_json)
        atomic.replace_directory(temporary, final)

    def _prune(self, best_step: int | None) -> None:
        saved = checkpoints(self._run.checkpoints_dir)
        keep = set(list(saved)[-self._config.keep_last :])
        if self._config.keep_best and best_step is not None:
            keep.add(best_step)
        for step, path in saved.items():
            if step not in keep:
                discard = path.with_name(f"{UNFINISHED}{path.name}")
                path.rename(discard)
                shutil.rmtree(discard)
