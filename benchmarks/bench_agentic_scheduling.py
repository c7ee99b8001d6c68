"""How episodes are scheduled: environments each on their own or stepped together, and what a turn costs the driver.

    make bench NAME=agentic

1. Turns of Normal(1 s, 1 s): the production loop of episodes over `EnvHosts`, in virtual time, and once in real time
   (three minutes). Stepped together, every turn waits for the slowest environment.
2. Workloads like ALFWorld and SWE (`examples/simulation/`) in the simulator, against the synchronous baseline.
3. 2,000 episodes at once on one driver, engines that answer when it is their time: CPU of the driver for each turn,
   with environments in the loop, the default model's tokenizer and its chat template; beside it, what all but these
   two take.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from _report import ROOT, report

from roll.config.simulation import load_simulation
from roll.envs.hosting import EnvHosts, HostedEnv
from roll.rollout import LLMProxy, RolloutScheduler, SamplingPlan
from roll.simulation.clock import run
from roll.simulation.report import simulate_variants
from roll.types import (
    EncodedText,
    EngineLoad,
    EnvironmentSettings,
    Generation,
    GenerationRequest,
    IntArray,
    Message,
    Prompt,
    PromptDraw,
    RewardResult,
    Rollout,
    SamplingParams,
)

NUM_EPISODES, NUM_TURNS = 64, 32
GOALS = {"alone_virtual": 2.0, "alone_real": 2.0, "alfworld": 2.72, "swe": 1.81}
GOAL_MS_PER_TURN = 1.0
NUM_CONCURRENT, TURNS_OF_EACH, NUM_ENGINES = 2000, 8, 16
ANSWER = np.arange(100, 140, dtype=np.int32)
LOGPROBS = np.zeros(len(ANSWER), np.float32)
VERSIONS = np.zeros(len(ANSWER), np.int32)


@dataclass(eq=False)
class Engine:
    """Answers after a while, whoever asks."""

    engine_id: str
    answer_s: float
    answer: IntArray

    async def generate(self, request: GenerationRequest) -> Generation:
        await asyncio.sleep(self.answer_s)
        return Generation(
            request_id=request.request_id,
            token_ids=self.answer,
            logprobs=LOGPROBS,
            policy_versions=VERSIONS,
            finish_reason="stop",
            engine_id=self.engine_id,
        )

    async def abort(self, request_ids: Collection[str]) -> None:
        return None

    def load(self) -> EngineLoad:
        return EngineLoad(num_running=0, num_waiting=0, kv_used=0.0, capacity=10_000)


class Engines:
    """A fixed group."""

    def __init__(self, answer_s: float, answer: IntArray, number: int = NUM_ENGINES) -> None:
        self.engines = [Engine(f"e{index}", answer_s, answer) for index in range(number)]


class Renderer:
    """A character is a token."""

    drops_tool_results = False

    def render_text(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    def encode(self, text: str) -> EncodedText:
        return EncodedText(np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int32))

    def decode(self, token_ids: IntArray) -> str:
        return bytes(token_ids.astype(np.uint8)).decode("ascii", "replace")

    def parse_answer(self, answer: IntArray, context: IntArray, stops: Collection[int] = ()) -> tuple[str, bool]:
        return self.decode(answer), False

    def encode_suffix(self, text: str, has_end_token: bool) -> EncodedText | None:
        return self.encode(text)

    def escape_special_tokens(self, text: str) -> str:
        return text

    def tokenize_follow_up(self, observation: str) -> IntArray:
        return self.encode(f"<user>{observation}<assistant>").token_ids


@dataclass(eq=False)
class Barrier:
    """In place of environments each on their own: a turn begins when all others of it have ended."""

    number: int
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    async def meet(self) -> None:
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(arrival)
        if len(self._waiting) == self.number:
            waiting, self._waiting = self._waiting, []
            for other in waiting:
                other.set_result(None)
        await arrival


@dataclass(eq=False)
class Slow:
    """A host whose environments take Normal(1 s, 1 s) for a turn (0 where that is negative)."""

    barrier: Barrier | None = None

    async def start(self, settings: EnvironmentSettings) -> HostedEnv:
        return _SlowEnv(self)

    async def close(self) -> None: ...


class _SlowEnv:
    def __init__(self, host: Slow) -> None:
        self._host = host

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._draw = random.Random(seed)
        return "begin", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(max(self._draw.gauss(1.0, 1.0), 0.0))
        if self._host.barrier is not None:
            await self._host.barrier.meet()
        return "go on", 0.0, False, False, {}

    async def close(self) -> None: ...


async def reward(rollout: Rollout) -> RewardResult:
    """Free."""
    return RewardResult(value=float(rollout.index))


async def nothing(engine: object) -> None:
    """A fresh engine needs nothing."""


async def played(
    hosts: EnvHosts,
    number: int,
    num_turns: int,
    answer_s: float,
    *,
    renderer: Any = Renderer(),  # noqa: B008
    answer: IntArray = ANSWER,
    **settings: Any,
) -> float:
    """Seconds of the loop's time in which so many episodes are played, all at once."""
    proxy = LLMProxy(Engines(answer_s, answer), nothing)  # type: ignore[arg-type]
    scheduler = RolloutScheduler(proxy, {"d": reward}, renderer, seed=0, hosts=hosts)
    draws = [
        PromptDraw(
            draw_id=index,
            prompt=Prompt(
                uid=f"d/{index}",
                domain="d",
                messages=(Message(role="user", content=""),),
                environment=EnvironmentSettings(seed=index, opening="{prompt}", step_time_limit_s=1e6, **settings),
                turns=num_turns,
            ),
            token_ids=ANSWER,
        )
        for index in range(number)
    ]
    plan = SamplingPlan(purpose="train", group_size=1, sampling=SamplingParams(max_new_tokens=64))
    loop = asyncio.get_running_loop()
    begun = loop.time()
    groups = await scheduler.collect(draws, plan)
    assert all(len(rollout.turns) == num_turns for group in groups for rollout in group.rollouts)
    has_end_token = loop.time()
    await proxy.close()
    return has_end_token - begun


def stepping(*, real: bool) -> float:
    """How many times as long environments take that are stepped together."""

    def seconds(barrier: Barrier | None) -> float:
        work = played(EnvHosts({"pool": Slow(barrier)}), NUM_EPISODES, NUM_TURNS, 0.1, name="slow", host="pool")
        return asyncio.run(work) if real else run(work)

    together, alone = seconds(Barrier(NUM_EPISODES)), seconds(None)
    print(f"{'real' if real else 'virtual'} time: together {together:.2f} s, each alone {alone:.2f} s")
    return together / alone


def simulated(name: str) -> tuple[float, dict[str, float]]:
    """How much faster the best policy is than the synchronous baseline, and the seconds of every variant's step."""
    config = load_simulation(ROOT / "examples" / "simulation" / f"{name}.yaml")
    results = simulate_variants(config)
    seconds = {variant: results.compute_step_s(variant).mean for variant in results.runs}
    return seconds["synchronous"] / seconds["best"], seconds


def driver(**tokens: Any) -> float:
    """Milliseconds of CPU for each turn, of 2,000 episodes at once."""
    begun = time.process_time()
    options = {"max_number": 9, "num_turns": TURNS_OF_EACH + 1}
    environment = {"name": "guess_number", "host": "loop", "options": options}
    run(played(EnvHosts(), NUM_CONCURRENT, TURNS_OF_EACH, 1.0, **environment, **tokens))
    return (time.process_time() - begun) / (NUM_CONCURRENT * TURNS_OF_EACH) * 1e3


def with_a_tokenizer() -> dict[str, Any]:
    """The default model's, and an answer of as many tokens as elsewhere, which ends as its answers do."""
    from roll.data import ChatRenderer
    from roll.models import find_stop_token_ids, load_tokenizer, resolve_model

    path = resolve_model("smollm2-135m-instruct")
    renderer = ChatRenderer(load_tokenizer(path))
    said = renderer.tokenize("I think that the number is smaller than the last one, but not by much. " * 4)
    return {
        "renderer": renderer,
        "answer": np.array([*said[: len(ANSWER) - 1], *find_stop_token_ids(path)[:1]], np.int32),
    }


def main() -> None:
    """Measure all three; `--parts stepping,simulated,driver` measures some."""
    parts = sys.argv[2].split(",") if sys.argv[1:2] == ["--parts"] else ["stepping", "simulated", "driver"]
    figures: dict[str, Any] = {}
    if "stepping" in parts:
        figures["alone_virtual"] = stepping(real=False)
        figures["alone_real"] = stepping(real=True)
    if "simulated" in parts:
        for name in ("alfworld", "swe"):
            figures[name], figures[f"{name}_step_s"] = simulated(name)
    if "driver" in parts:
        real = with_a_tokenizer()
        figures["driver_ms_per_turn"] = min(driver(**real) for _ in range(3))
        figures["driver_ms_per_turn_without_tokens"] = min(driver() for _ in range(3))
    for name, found in figures.items():
        print(f"{name}: {found if isinstance(found, dict) else round(found, 3)} (goal {GOALS.get(name, '')})")
    report("agentic_scheduling", figures)
    missed = [name for name, goal in GOALS.items() if figures.get(name, goal) < goal]
    if figures.get("driver_ms_per_turn", 0.0) > GOAL_MS_PER_TURN:
        missed.append("driver_ms_per_turn")
    if missed:
        raise SystemExit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
