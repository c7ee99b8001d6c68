"""Recorder of a run: events of the loop, the life cycle and the proxy become a step of the recording.

    LifeCycle ─ transitions ─► moves ────┐
    RecordingProxy ─ calls ─► requests ──┼─► RecordedStep ─► (a thread) ─► recording/step-N/
    cross_boundary ─ batch, state ───────┘

Invariants:
    - at every step's boundary all events since the last one are written and freed: memory holds one step;
    - a step is recorded before its metrics and before any checkpoint that contains it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from roll.config.load import dump_config
from roll.config.pipelines.rlvr import RLVRConfig
from roll.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from roll.pipelines.learning.state import LearningState
from roll.pipelines.preparation import Prepared
from roll.pipelines.recording.files import RecordingWriter
from roll.pipelines.recording.records import Move, RecordedDraw, RecordedStep, Request, Session
from roll.rollout import Batch, DataLedger, LifeCycle, LLMProxy, Transition
from roll.rollout.proxy import OnStart
from roll.tracking import Tracker
from roll.tracking.run_directory import writing
from roll.types import Generation, GenerationRequest, Rollout
from roll.version import __version__

__all__ = ["Recorder", "RecordingProxy", "open_recorder", "session_of"]


@dataclass(eq=False)
class Recorder:
    """Records one session of a run."""

    writer: RecordingWriter
    """Writer of the run's recording."""
    session: Session
    """The session that is recorded."""
    origin: float
    """Time of the running loop that is time 0 of the session."""
    policy_version: int
    """Policy version of the trainer."""
    tracker: Tracker
    """Tracker of the run."""
    ledger: DataLedger
    """Ledger of the run."""
    _proxy: LLMProxy | None = field(init=False, default=None)
    _moves: list[Move] = field(init=False, default_factory=list)
    _requests: list[Request] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._num_draws = self.session.num_draws
        self.writer.begin(self.session)

    def listen(self, life: LifeCycle, proxy: LLMProxy) -> None:
        """Observe every transition and, if the proxy is a `RecordingProxy`, every request."""
        life.listen(self.on_transition)
        self._proxy = proxy
        if isinstance(proxy, RecordingProxy):
            proxy.on_request = self.on_request

    def on_transition(self, event: Transition) -> None:
        """Record a transition; a listener of `LifeCycle`."""
        before = "" if event.before is None else str(event.before)
        self._moves.append(Move(event.time - self.origin, event.rollout_id, before, str(event.after), event.detail))

    def on_request(self, request: Request) -> None:
        """Record a request; called by `RecordingProxy` with times of the event loop."""
        started = request.started_s - self.origin if request.started_s >= 0 else -1.0
        queued, ended = request.queued_s - self.origin, request.ended_s - self.origin
        self._requests.append(request._replace(queued_s=queued, started_s=started, ended_s=ended))

    async def record(self, state: LearningState, batch: Batch, demonstrations: Sequence[Rollout]) -> None:
        """Record a step after its boundary is marked and before its metrics are written.

        Raises:
            RunDirectoryError: The recording cannot be written.
        """
        with self.tracker.spans.phase("recording"):
            step = self._step(state, batch, demonstrations)
            self._moves, self._requests = [], []
            self._num_draws, self.policy_version = step.num_draws, step.next_policy_version
            await asyncio.to_thread(self._write, step)

    def _write(self, step: RecordedStep) -> None:
        with writing(self.tracker.run.path):
            self.writer.write(step)

    def _step(self, state: LearningState, batch: Batch, demonstrations: Sequence[Rollout]) -> RecordedStep:
        proxy = self._proxy
        assert proxy is not None, "`listen` comes before the first step"
        opened = [self.ledger[draw_id] for draw_id in range(self._num_draws, state.num_draws)]
        times = {name.removeprefix("time/").removesuffix("_s"): v for name, v in self.tracker.spans.metrics().items()}
        return RecordedStep(
            step=state.step,
            session=self.session.number,
            policy_version=self.policy_version,
            next_policy_version=state.policy_version,
            groups=tuple(batch.groups),
            companions={purpose: tuple(groups) for purpose, groups in batch.companions.items()},
            demonstrations=tuple(demonstrations),
            left_out=batch.left_out,
            expired=batch.expired,
            expired_lengths=tuple(batch.expired_lengths),
            num_refills=batch.num_refills,
            kind=batch.kind,
            staleness=tuple(batch.staleness),
            census=asdict(batch.census) if batch.census else {},
            draws=tuple(RecordedDraw(entry.draw_id, entry.uid, entry.step) for entry in opened),
            stream=state.data,
            num_draws=state.num_draws,
            pending=_pending(state),
            counters=proxy.counts(),
            timings_s=times,
            moves=tuple(self._moves),
            requests=tuple(self._requests),
        )


def _pending(state: LearningState) -> tuple[tuple[int, str, int], ...]:
    return tuple((draw_id, domain, position) for draw_id, domain, position in state.pending)


class RecordingProxy(LLMProxy):
    """An `LLMProxy` that reports when every request was queued, started and ended.

    `on_request` does nothing until the recorder sets it.
    """

    on_request: Callable[[Request], None] = staticmethod(lambda request: None)

    async def generate(
        self,
        request: GenerationRequest,
        *,
        session: str = "",
        pinned: bool = False,
        on_start: OnStart | None = None,
    ) -> Generation:
        """See `LLMProxy.generate`."""
        clock = asyncio.get_running_loop().time
        seen = Request(request.request_id, "", clock(), -1.0, 0.0, len(request.token_ids), -1, "failed")

        def started(engine_id: str) -> None:
            nonlocal seen
            seen = seen._replace(engine_id=engine_id, started_s=clock() if seen.started_s < 0 else seen.started_s)
            if on_start is not None:
                on_start(engine_id)

        try:
            found = await super().generate(request, session=session, pinned=pinned, on_start=started)
            seen = seen._replace(num_tokens=len(found.token_ids), finish_reason=found.finish_reason)
            return found
        except asyncio.CancelledError:
            seen = seen._replace(finish_reason="cancelled")
            raise
        finally:
            self.on_request(seen._replace(ended_s=clock()))


def open_recorder(
    config: RLVRConfig, prepared: Prepared, state: LearningState, tracker: Tracker, ledger: DataLedger
) -> Recorder:
    """Start recording; the recording must already be truncated to `state`.

    Raises:
        RunDirectoryError: The recording cannot be written.
    """
    now = asyncio.get_running_loop().time()
    with writing(tracker.run.path):
        writer = RecordingWriter(tracker.run.recording_dir)
        session = replace(session_of(config, prepared, state), number=writer.next_session)
        return Recorder(writer, session, now, state.policy_version, tracker, ledger)


def session_of(config: RLVRConfig, prepared: Prepared, state: LearningState) -> Session:
    """Return the data that a session's steps have in common, with number 1."""
    return Session(
        number=1,
        step=state.step,
        started=time.time(),
        version=__version__,
        config=dump_config(config),
        model=model_fingerprint(prepared.model_path),
        tokenizer=tokenizer_fingerprint(prepared.tokenizer),
        stream=state.data,
        num_draws=state.num_draws,
        pending=_pending(state),
    )
