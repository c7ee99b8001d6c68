"""Training on recorded batches: the loop of `rlvr`, with the recording in place of generation.

    recording ─► batch ─► filter ─► advantages ─► train ─► boundary ─► next batch …

No engine is started, nothing is scored, and nothing is evaluated: there is nobody to answer. With the recorded
configuration every metric of training, and the weights, are those of the recorded run, bit for bit. With another
algorithm it is an off-line study: the recorded log-probs and policy versions are those of the policy that answered,
and ratios and corrections are taken against them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from roll.cluster.base import open_cluster, start_together
from roll.config.pipelines.rlvr import RLVRConfig
from roll.pipelines.learning.losses import check_own_functions
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.preparation import prepare
from roll.pipelines.rlvr.collecting import Collected, chosen
from roll.pipelines.rlvr.replay.batches import RecordedBatches
from roll.pipelines.rlvr.replay.checks import check_prepared, check_steps, check_training, open_recording, start_of
from roll.pipelines.rlvr.step import learn_from
from roll.pipelines.rlvr.trainers import device_role, learner_of, trainer_specs
from roll.pipelines.run import Run, Session, beginning, take_steps, whole_run
from roll.running import in_thread

__all__ = ["open_training"]


@asynccontextmanager
async def open_training(config: RLVRConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Compare with the recording, start the trainers alone, and end them afterwards; inside, the loop to run.

    Raises:
        UserError: this cannot be replayed; says why.
    """
    recording = await in_thread(open_recording, config)
    session = replace(session, saved=session.saved or start_of(config))
    saved = session.saved
    check_steps(recording, (saved.state.step if saved else 0) + 1, config.training.num_steps)
    check_own_functions(config.algorithm)
    prepared = await in_thread(prepare, config, scores=False)
    check_prepared(recording.start, prepared)
    check_training(config, recording, recording.start)
    data = prepared.data
    state = beginning(saved, data.train, LearningState)
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles, session.directory)
        stack.push_async_callback(cluster.close)
        specs = await in_thread(trainer_specs, config, prepared.model_path)
        starting = (cluster.start_trainer(spec, device_role(spec)) for spec in specs)
        learner = learner_of(config, await start_together(stack, *starting))
        if saved:
            await learner.load(saved)
        run = Run.of(config, config.training.num_steps, session, state, data.train, learner.policy, learner.critics)
        batches = RecordedBatches(recording, data, state, run.ledger)
        online = OnlineRun(config=config, run=run, learner=learner, batches=batches, engine_counts=batches.counts)
        yield partial(_train_again, online, batches)


async def _train_again(online: OnlineRun[RLVRConfig], batches: RecordedBatches) -> None:
    """Run the remaining recorded steps.

    Raises:
        AlarmError: an alarm stops the run; everything up to this step's boundary is saved.
        DataError: the recording is damaged, or the data are not those of the recorded run.
        Interrupted: a signal asked for a stop; everything up to the last step's boundary is saved.
    """
    run, config = online.run, online.config

    async def read() -> Collected:
        with run.spans.phase("read"):
            batch = await batches.next_batch()
        weighed = config.algorithm.imitation.weight > 0
        return chosen(config, run, batch, batches.demonstrations if weighed else ())

    async def step() -> list[str]:
        return await learn_from(online, await run.stop.unless(read()))

    async with whole_run(run):
        await take_steps(run, step)
