"""An engine simulated the slow way: every step and every token by itself. What `batch` must equal."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.simulation.batch import BatchLimits
from roll.simulation.costs import EngineCosts


@dataclass(frozen=True)
class Arrival:
    name: str
    time: float
    prompt: int
    wanted: int
    priority: int = 0
    abort_at: float | None = None


@dataclass(frozen=True)
class Hold:
    """From `time` on (and not before the previous one is over) the engine rests for so long."""

    time: float
    duration: float
    new_weights: bool


@dataclass
class Outcome:
    time: float
    versions: list[int]
    aborted: bool


@dataclass(eq=False)
class _Request:
    arrival: Arrival
    order: int
    versions: list[int] = field(default_factory=list)
    to_prefill: int = 0
    gone: bool = False

    @property
    def context(self) -> int:
        return self.arrival.prompt + len(self.versions)

    @property
    def rank(self) -> tuple[int, int]:
        return self.arrival.priority, self.order


class Reference:
    """Runs a script to its end; `outcomes` by name, and `num_preempted`."""

    def __init__(
        self, costs: EngineCosts, limits: BatchLimits, arrivals: list[Arrival], holds: list[Hold], pause: float = 0
    ) -> None:
        self.costs, self.limits = costs, limits
        self.events: list[tuple[float, int, str, Arrival]] = []
        for arrival in arrivals:
            self.events.append((arrival.time, len(self.events), "arrive", arrival))
            if arrival.abort_at is not None:
                self.events.append((arrival.abort_at, len(self.events), "abort", arrival))
        self.events.sort(key=lambda event: event[:2])
        self.holds = list(holds)
        self.held_to = 0.0
        self.waiting: list[_Request] = []
        self.resident: list[_Request] = []
        self.outcomes: dict[str, Outcome] = {}
        self.num_arrived = self.num_preempted = self.version = 0
        self.now = 0.0
        while self.turn():
            pass

    def apply_events(self, until: float) -> None:
        """All events up to a moment, that included."""
        while self.events and self.events[0][0] <= until:
            time, _, kind, arrival = self.events.pop(0)
            if kind == "arrive":
                self.waiting.append(_Request(arrival, self.num_arrived))
                self.num_arrived += 1
            elif arrival.name not in self.outcomes:
                request = next(r for r in self.waiting + self.resident if r.arrival is arrival)
                request.gone = True
                self.outcomes[arrival.name] = Outcome(time, list(request.versions), True)

    def turn(self) -> bool:
        """One step, one hold, or one wait; whether there is anything left."""
        self.apply_events(self.now)
        self.remove_gone()
        if self.holds and max(self.holds[0].time, self.held_to) <= self.now:
            self.hold(self.holds.pop(0))
            return True
        if not self.waiting and not self.resident:
            moments = [event[0] for event in self.events[:1]]
            moments += [max(hold.time, self.held_to) for hold in self.holds[:1]]
            if not moments:
                return False
            self.now = max(self.now, min(moments))
            return True
        self.step()
        return True

    def remove_gone(self) -> None:
        self.waiting = [r for r in self.waiting if not r.gone]
        self.resident = [r for r in self.resident if not r.gone]

    def hold(self, hold: Hold) -> None:
        self.now += hold.duration
        self.apply_events(self.now)
        self.remove_gone()
        self.held_to = self.now
        if hold.new_weights:
            self.version += 1
            self.waiting += self.resident
            self.resident = []

    def step(self) -> None:
        used = sum(r.context for r in self.resident)
        preempted = False
        while used + len(self.resident) > self.limits.kv_capacity:
            victim = self.resident.pop()
            victim.to_prefill = 0
            used -= victim.context
            self.waiting.append(victim)
            self.num_preempted += 1
            preempted = True
        decoding = [r for r in self.resident if r.to_prefill == 0]
        budget = self.limits.max_batched_tokens - len(decoding)
        chunks: list[tuple[_Request, int]] = []
        for request in self.resident:
            if request.to_prefill and budget:
                chunks.append((request, min(budget, request.to_prefill)))
                budget -= chunks[-1][1]
        if not preempted:
            for request in sorted(self.waiting, key=lambda r: r.rank):
                room = used + len(self.resident) + request.context + 1 <= self.limits.kv_capacity
                if not room or not budget or len(self.resident) == self.limits.max_num_seqs:
                    break
                self.waiting.remove(request)
                self.resident.append(request)
                request.to_prefill = request.context
                used += request.context
                chunks.append((request, min(budget, request.to_prefill)))
                budget -= chunks[-1][1]
        self.now = self.time_of_step(decoding, chunks)

        for request in decoding:
            self.add_token(request)
        for request, chunk in chunks:
            request.to_prefill -= chunk
            if request.to_prefill == 0:
                self.add_token(request)
        self.resident = [r for r in self.resident if r.arrival.name not in self.outcomes]

    def time_of_step(self, decoding: list[_Request], chunks: list[tuple[_Request, int]]) -> float:
        """When the step ends; what comes before that is applied, and ends no earlier step."""
        costs = self.costs
        tokens = len(decoding) + sum(chunk for _, chunk in chunks)
        seconds = costs.overhead_s + max(costs.weights_s, tokens * costs.token_s) + tokens * costs.communication_s
        seconds += len(decoding) * costs.request_s
        for request in decoding:
            seconds += request.context * costs.context_s
        for request, chunk in chunks:
            before = request.context - request.to_prefill
            seconds += chunk * (before + chunk / 2) * costs.pair_s
        end = self.now + seconds
        while self.events and self.events[0][0] < end:
            self.apply_events(self.events[0][0])
        return end

    def add_token(self, request: _Request) -> None:
        request.versions.append(self.version)
        if len(request.versions) == request.arrival.wanted and not request.gone:
            self.outcomes[request.arrival.name] = Outcome(self.now, list(request.versions), False)
