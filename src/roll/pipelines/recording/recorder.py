"""Records a run: events of the loop, the life cycle and the proxy become a step of the recording.

    LifeCycle ─ transitions ─► moves ────┐
    RecordingProxy ─ calls ─► requests ──┼─► RecordedStep ─► (a thread) ─► recording/step-N/
    finish_step ──── batch, state ───────┘

Invariants:
    - at every step boundary, all events since the previous boundary are written and freed, so only one step is in
      memory;
    - a step is recorded before its metrics and before any checkpoint that contains it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from roll.config.load import dump_config
from roll.config.pipelines.rlvr import RLVRConfig
from roll.models.fingerprint import compute_model_fingerprint, compute_tokenizer_fingerprint
from roll.pipelines.learning.state import LearningState
from roll.pipelines.preparation import PreparedRun
from roll.pipelines.recording.files import RecordingWriter
from roll.pipelines.recording.records import (
    RecordedDraw,
    RecordedRequest,
    RecordedSession,
    RecordedStep,
    RecordedTransition,
)
from roll.rollout import Batch, DataLedger, LifeCycle, LLMProxy, Transition
from roll.rollout.proxy import OnStart
from roll.tracking import Tracker
from roll.tracking.run_directory import convert_write_errors
from roll.types import Generation, GenerationRequest, Rollout
from roll.version import __version__

__all__ = ["Recorder", "RecordingProxy", "build_session", "open_recorder"]


@dataclass(eq=False)
class Recorder:
    """Records one session of a run."""

    writer: RecordingWriter
    """Writer of the run's recording."""
    session: RecordedSession
    """The session that is recorded."""
    origin: float
    """Event loop time at which the session began; recorded times are relative to it."""
    policy_version: int
    """Policy version of the trainer."""
    tracker: Tracker
    """Tracker of the run."""
    ledger: DataLedger
    """Ledger of the run."""
    _proxy: LLMProxy | None = field(init=False, default=None)
    _transitions: list[RecordedTransition] = field(init=False, default_factory=list)
    _requests: list[RecordedRequest] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._num_draws = self.session.num_draws
        self.writer.begin(self.session)

    def listen(self, lifecycle: LifeCycle, proxy: LLMProxy) -> None:
        """Observe every transition and, if the proxy is a `RecordingProxy`, every request."""
        lifecycle.add_listener(self.on_transition)
        self._proxy = proxy
        if isinstance(proxy, RecordingProxy):
            proxy.on_request = self.on_request

    def on_transition(self, event: Transition) -> None:
        """Record a transition; a listener of `LifeCycle`."""
        before = "" if event.before is None else str(event.before)
        self._transitions.append(
            RecordedTransition(event.time - self.origin, event.rollout_id, before, str(event.after), event.detail)
        )

    def on_request(self, request: RecordedRequest) -> None:
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
            step = self._build_step(state, batch, demonstrations)
            self._transitions, self._requests = [], []
            self._num_draws, self.policy_version = step.num_draws, step.next_policy_version
            await asyncio.to_thread(self._write, step)

    def _write(self, step: RecordedStep) -> None:
        with convert_write_errors(self.tracker.run.path):
            self.writer.write(step)

    def _build_step(self, state: LearningState, batch: Batch, demonstrations: Sequence[Rollout]) -> RecordedStep:
        proxy = self._proxy
        assert proxy is not None, "`listen` comes before the first step"
        opened = [self.ledger[draw_id] for draw_id in range(self._num_draws, state.num_draws)]
        times = {
            name.removeprefix("time/").removesuffix("_s"): v for name, v in self.tracker.spans.get_metrics().items()
        }
        return RecordedStep(
            step=state.step,
            session=self.session.number,
            policy_version=self.policy_version,
            next_policy_version=state.policy_version,
            groups=tuple(batch.groups),
            companions={purpose: tuple(groups) for purpose, groups in batch.companions.items()},
            demonstrations=tuple(demonstrations),
            left_out=batch.rejection_reasons,
            expired=batch.expired,
            expired_lengths=tuple(batch.expired_lengths),
            num_refills=batch.num_refills,
            kind=batch.kind,
            staleness=tuple(batch.staleness),
            selection_bias=asdict(batch.selection_bias) if batch.selection_bias else {},
            draws=tuple(RecordedDraw(entry.draw_id, entry.uid, entry.step) for entry in opened),
            stream=state.data,
            num_draws=state.num_draws,
            pending=_list_pending(state),
            counters=proxy.get_counters(),
            timings_s=times,
            transitions=tuple(self._transitions),
            requests=tuple(self._requests),
        )


def _list_pending(state: LearningState) -> tuple[tuple[int, str, int], ...]:
    return tuple((draw_id, domain, position) for draw_id, domain, position in state.pending)


class RecordingProxy(LLMProxy):
    """An `LLMProxy` that reports when every request was queued, started and ended.

    `on_request` does nothing until the recorder sets it.
    """

    on_request: Callable[[RecordedRequest], None] = staticmethod(lambda request: None)

    async def generate(
        self,
        request: GenerationRequest,
        *,
        session: str = "",
        pinned: bool = False,
        domain: str = "",
        on_start: OnStart | None = None,
    ) -> Generation:
        """Generate as `LLMProxy.generate` does, and report the request to `on_request`."""
        clock = asyncio.get_running_loop().time
        seen = RecordedRequest(request.request_id, "", clock(), -1.0, 0.0, len(request.token_ids), -1, "failed")

        def record_start(engine_id: str) -> None:
            nonlocal seen
            seen = seen._replace(engine_id=engine_id, started_s=clock() if seen.started_s < 0 else seen.started_s)
            if on_start is not None:
                on_start(engine_id)

        try:
            found = await super().generate(
                request, session=session, pinned=pinned, domain=domain, on_start=record_start
            )
            seen = seen._replace(num_tokens=len(found.token_ids), finish_reason=found.finish_reason)
            return found
        except asyncio.CancelledError:
            seen = seen._replace(finish_reason="cancelled")
            raise
        finally:
            self.on_request(seen._replace(ended_s=clock()))


def open_recorder(
    config: RLVRConfig, prepared: PreparedRun, state: LearningState, tracker: Tracker, ledger: DataLedger
) -> Recorder:
    """Begin a session of the run's recording, and return its recorder.

    The recording must already be truncated to the step of `state`.

    Raises:
        RunDirectoryError: The recording cannot be written.
    """
    now = asyncio.get_running_loop().time()
    with convert_write_errors(tracker.run.path):
        writer = RecordingWriter(tracker.run.recording_dir)
        session = replace(build_session(config, prepared, state), number=writer.next_session)
        return Recorder(writer, session, now, state.policy_version, tracker, ledger)


def build_session(config: RLVRConfig, prepared: PreparedRun, state: LearningState) -> RecordedSession:
    """Build the record of a session that begins with `state`. The recorder later replaces the session number 1."""
    return RecordedSession(
        number=1,
        step=state.step,
        started=time.time(),
        version=__version__,
        config=dump_config(config),
        model=compute_model_fingerprint(prepared.model_path),
        tokenizer=compute_tokenizer_fingerprint(prepared.tokenizer),
        stream=state.data,
        num_draws=state.num_draws,
        pending=_list_pending(state),
    )
