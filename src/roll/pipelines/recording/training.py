"""Training on recorded batches: the loop of all online pipelines, with the recording instead of generation.

    recording ─► batch ─► filter ─► advantages ─► train ─► boundary ─► next batch …

No engine is started, and nothing is scored or evaluated. With the recorded configuration, all training metrics and the
weights are bitwise equal to those of the recorded run. With another algorithm it is an offline study: ratios and
corrections use the recorded log-probs and policy versions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from functools import partial

from roll.cluster.base import open_cluster, start_concurrently
from roll.config.pipelines.rlvr import RLVRConfig
from roll.pipelines.learning.losses import check_user_functions
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online.loop import train
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.preparation import prepare
from roll.pipelines.recording.batches import RecordedBatches
from roll.pipelines.recording.checks import (
    check_recorded_inputs,
    check_steps,
    check_training,
    copy_media,
    find_start_checkpoint,
    open_recording,
)
from roll.pipelines.reinforcement.objective import ReinforcementObjective
from roll.pipelines.reinforcement.trainers import build_learner, build_trainer_specs, get_device_role
from roll.pipelines.run import Run, Session, restore_state, run_session
from roll.rollout import Batch
from roll.running import run_in_thread
from roll.types import Rollout

__all__ = ["open_training_replay"]


@asynccontextmanager
async def open_training_replay(config: RLVRConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Check the recording, start only the trainers, yield the loop to run, and shut the trainers down afterwards.

    Raises:
        UserError: The run cannot be replayed; the message gives the reason.
    """
    recording = await run_in_thread(open_recording, config)
    await run_in_thread(copy_media, recording, session.directory)
    session = replace(session, saved=session.saved or find_start_checkpoint(config))
    saved = session.saved
    check_steps(recording, (saved.state.step if saved else 0) + 1, config.training.num_steps)
    check_user_functions(config.algorithm)
    prepared = await run_in_thread(prepare, config, session.directory.media_dir, scores=False)
    check_recorded_inputs(recording.first_session, prepared)
    check_training(config, recording, recording.first_session)
    data = prepared.data
    state = restore_state(saved, data.train, LearningState)
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles, session.directory)
        stack.push_async_callback(cluster.close)
        specs = await run_in_thread(build_trainer_specs, config, prepared.model_path)
        starting = (cluster.start_trainer(spec, get_device_role(spec)) for spec in specs)
        learner = build_learner(config, await start_concurrently(stack, *starting))
        if saved:
            await learner.load(saved)
        run = Run.create(config, config.training.num_steps, session, state, data.train, learner.policy, learner.critics)
        batches = RecordedBatches(recording, data, state, run.ledger)
        policy_engines = RecordedEngines(run, batches)
        online = OnlineRun(config=config, run=run, learner=learner, batches=batches, policy_engines=policy_engines)

        async def get_demonstrations(batch: Batch) -> Sequence[Rollout]:
            return batches.demonstrations if config.algorithm.imitation.weight > 0 else ()

        yield partial(train, online, ReinforcementObjective(online=online, get_demonstrations=get_demonstrations))


@dataclass(frozen=True, slots=True)
class RecordedEngines:
    """Replaces the engines in a training replay, which generates nothing; implements `RunEngines`."""

    run: Run[LearningState]
    """The run of the replay."""
    batches: RecordedBatches
    """The recorded batches."""

    def open_session(self, stall_s: float) -> AbstractAsyncContextManager[None]:
        """Return the context manager in which all steps run; it saves a checkpoint at the end."""
        return run_session(self.run)

    async def wake(self) -> None:
        """Do nothing, since there are no engines."""

    def measure_wait(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that measures the wait for a recorded batch."""
        return self.run.spans.phase("read")

    def enter_training(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that does nothing, since no engines use the devices."""
        return nullcontext()

    async def push(self) -> dict[str, float]:
        """Do nothing, since there are no engines."""
        return {}

    async def wait_for_evaluation(self) -> None:
        """Do nothing, since nothing is evaluated."""

    def get_counts(self) -> dict[str, int]:
        """Return the recorded counts of engines and requests."""
        return self.batches.get_counts()

    def collect_metrics(self) -> dict[str, float]:
        """Return a count of 0 retries, the only metric of generation in a replay without engines."""
        return {"rollout/retries": 0.0}

    def get_verifier_states(self) -> None:
        """Return `None`, since no answer is scored."""

    def trace(self) -> None:
        """Do nothing, since there are no engines."""
