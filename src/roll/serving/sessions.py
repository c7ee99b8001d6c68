"""Sessions: what belongs to one client program, until the program finishes it or sends no more heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from roll.serving.failures import ApiError
from roll.serving.promises import Promise
from roll.serving.sampling import SamplingSession
from roll.serving.submissions import Submission

__all__ = ["Session", "Sessions", "Submissions"]


class Submissions:
    """The requests by their number, so that a repeated request is not run twice."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._known: dict[int, tuple[bytes, Promise]] = {}

    def find(self, number: int, submission: Submission) -> Promise | None:
        """Return the promise of the same request, if there is one.

        Raises:
            ApiError: The number was used for another request.
        """
        if number not in self._known:
            return None
        earlier, promise = self._known[number]
        if earlier != submission.digest:
            raise ApiError(400, f"{number} was already used for another request.", field=self._field)
        return promise

    def add(self, number: int, submission: Submission, promise: Promise) -> None:
        """Record a request."""
        self._known[number] = submission.digest, promise


@dataclass(kw_only=True, slots=True)
class Session:
    """A client program."""

    session_id: str
    owner: str
    last_seen: float
    is_finished: bool = False
    models: Submissions = field(default_factory=lambda: Submissions("model_seq_id"))
    model_ids: set[str] = field(default_factory=set)
    sampling: dict[str, SamplingSession] = field(default_factory=dict)
    """The sampling sessions, by ID."""
    samples: dict[str, Submissions] = field(default_factory=dict)
    """The requests of each sampling session."""
    kept: set[str] = field(default_factory=set)
    """The IDs of requests that the journal keeps until the session ends."""

    def forget(self) -> None:
        """Free the memory of a session that has ended."""
        self.models, self.kept = Submissions("model_seq_id"), set()
        self.model_ids.clear()
        self.sampling.clear()
        self.samples.clear()


class Sessions:
    """All sessions.

    Args:
        timeout_s: The time without a request or heartbeat after which a session ends.
        clock: A function that returns the time in seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._sessions: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def create(self, owner: str, session_id: str) -> Session:
        """Return a new session."""
        session = Session(session_id=session_id, owner=owner, last_seen=self._clock())
        self._sessions[session.session_id] = session
        return session

    def is_open(self, session_id: str) -> bool:
        """Return whether there is a session of this ID that has not ended."""
        return session_id in self._sessions and not self._sessions[session_id].is_finished

    def find(self, session_id: str, owner: str, *, field: str = "session_id") -> Session:
        """Return a session, and update the time of its last request.

        Raises:
            ApiError: There is no such session, it belongs to another owner (404), or it has ended (410).
        """
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise ApiError(404, "there is no such session of this key.", field=field)
        if session.is_finished:
            raise ApiError(410, "the session has ended: create a new one.", field=field)
        session.last_seen = self._clock()
        return session

    def find_sampling(self, sampling_session_id: str, owner: str) -> tuple[Session, SamplingSession]:
        """Return a sampling session and its session.

        Raises:
            ApiError: See `find`.
        """
        session = self.find(sampling_session_id.partition(":")[0], owner, field="sampling_session_id")
        if sampling_session_id not in session.sampling:
            raise ApiError(404, "there is no such sampling session.", field="sampling_session_id")
        return session, session.sampling[sampling_session_id]

    def add_sampling(self, session: Session, number: int, path: str | None, saved_by: str = "") -> str:
        """Add a sampling session, and return its ID; adding it again does nothing.

        Raises:
            ApiError: The number was used for other weights.
        """
        name = f"{session.session_id}:sample:{number}"
        added = SamplingSession(session_id=name, owner=session.owner, path=path, saved_by=saved_by)
        known = session.sampling.setdefault(name, added)
        if known.path != path:
            raise ApiError(400, f"{number} was already used for other weights.", field="sampling_session_seq_id")
        session.samples.setdefault(name, Submissions("seq_id"))
        return name

    def list_expired(self) -> list[Session]:
        """Return the sessions that have timed out."""
        limit = self._clock() - self._timeout_s
        return [each for each in self._sessions.values() if not each.is_finished and each.last_seen < limit]
