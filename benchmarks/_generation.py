"""Rounds of generation through the production scheduler, on real vLLM engines or on simulated ones: the same code.

    play(case, world) ─► AsyncController ─► RolloutScheduler ─► LLMProxy ─► world.engines
                               └─► world.rewards      (nothing trains: an update is a pause, where there is one)

`Real` engines generate with the model, and what comes of it (lengths, verdicts) is recorded. Simulated ones get the
same prompts, settings and recorded lengths, so that only times are predicted. An answer that a policy cut short is
known to be longer than it was: in the simulation it would go on to the longest allowed.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from roll.algorithms.filters import cannot_pass_filter, find_filter_reason
from roll.config.distributions import LognormalDistribution
from roll.config.scheduling import SchedulingConfig
from roll.inference import EngineSpec
from roll.protocols import InferenceEngine, Reward
from roll.rollout import AsyncController, BatchSpec, LLMProxy, RolloutScheduler, Router, SamplingPlan
from roll.rollout.engine_group import EngineGroup
from roll.rollout.loops import Generate, Renderer, generate_single_answer
from roll.simulation import clock
from roll.simulation.batch import BatchLimits
from roll.simulation.calibrate import build_measured_device
from roll.simulation.costs import compute_engine_costs
from roll.simulation.draws import draw_uniform
from roll.simulation.engine import EngineSettings
from roll.simulation.fit import EngineFit
from roll.simulation.hardware import load_device, load_model_sizes
from roll.simulation.roles import SimulatedEngines, SimulatedRenderer
from roll.types import (
    EngineLoad,
    EngineStepSpan,
    GenerationRequest,
    Group,
    Message,
    Prompt,
    PromptDraw,
    RewardResult,
    Rollout,
    SamplingParams,
)

PREFIX_BLOCK = 32
"""Tokens of a block of vLLM's cache on a CPU (`roll.inference.vllm.arguments`)."""
KV_BYTES = 1 << 30
MAX_CONTEXT = 1024
FILTERS = {"min_mean": 0.2, "max_mean": 0.8}
"""Groups that are too hard or too easy, for policies that filter."""
THINGS = (
    "a rainbow",
    "a volcano",
    "the moon",
    "bread",
    "a bicycle",
    "a river",
    "gravity",
    "a computer",
    "photosynthesis",
    "a thunderstorm",
    "chess",
    "a violin",
    "the heart",
    "an earthquake",
    "ice",
    "a library",
    "a bridge",
    "electricity",
    "a forest",
    "the internet",
    "a whale",
    "money",
    "a telescope",
    "sleep",
    "a desert",
    "coffee",
    "a train",
    "the ocean",
    "a magnet",
    "a garden",
    "a clock",
    "paper",
    "glass",
    "a spider",
    "a school",
    "football",
    "a map",
    "honey",
    "a shadow",
    "a satellite",
    "the brain",
    "a castle",
    "a bee",
    "steel",
    "a song",
    "a dictionary",
    "a lighthouse",
    "cheese",
    "an island",
    "a mirror",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: a policy and a workload."""

    name: str
    scheduling: Mapping[str, Any] = field(default_factory=dict)
    num_steps: int = 1
    prompts_per_step: int = 8
    group_size: int = 8
    max_num_seqs: int = 64
    """Of each engine."""
    max_new_tokens: int = 256
    temperature: float = 1.0
    kind: str = "mixed"
    """Of prompts, see `prompt_text`."""
    first_prompt: int = 0
    filters: bool = False
    """Groups outside `FILTERS` are replaced by others."""
    reward_s: float = 0.0
    """Median latency of a reward, which a judge elsewhere would take."""
    train_s: float = 0.0
    """An update, on devices of its own; 0: nothing is trained, and no weights are synchronised."""


def prompt_text(kind: str, number: int) -> str:
    """A question: `short` wants a number, `medium` a sentence, `long` a few; `mixed` is one of them."""
    thing = THINGS[(number * 7) % len(THINGS)]
    if kind == "mixed":
        kind = ("short", "medium", "short", "long", "medium", "short", "short", "medium")[number % 8]
    if kind == "short":
        return f"What is {number % 17 + 2} + {number * 5 % 13 + 1}? Answer with a number."
    if kind == "medium":
        return f"In one sentence, what is {thing}?"
    return f"Explain to a child what {thing} is."


def is_correct(prompt: str, text: str) -> bool:
    """A sum that is right; another answer of an even number of words, which no policy knows beforehand."""
    found = re.search(r"What is (\d+) \+ (\d+)\?", prompt)
    if found is None:
        return len(text.split()) % 2 == 0
    numbers = re.findall(r"\d+", text)
    return bool(numbers) and int(numbers[-1]) == int(found[1]) + int(found[2])


@dataclass
class Played:
    """What a run did."""

    wait_s: list[float] = field(default_factory=list)
    """Of each step for its batch: in a synchronous run, generation and rewards."""
    total_s: float = 0.0
    lengths: dict[str, int] = field(default_factory=dict)
    """Tokens of every answer that ended by itself or at the limit, by request id."""
    rewards: dict[str, float] = field(default_factory=dict)
    natural: int = 0
    """Answers that the model ended itself."""
    trained: int = 0
    trained_tokens: int = 0
    sync_s: list[float] = field(default_factory=list)
    stretches: list[EngineStepSpan] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    """Every move of every rollout, in order."""

    @property
    def makespan_s(self) -> float:
        """Of generation and rewards, over all steps."""
        return sum(self.wait_s)

    @property
    def per_sample_s(self) -> float:
        """Seconds for each rollout that a step got."""
        return self.total_s / max(1, self.trained)


class World(Protocol):
    """Where a case runs."""

    @property
    def engines(self) -> EngineGroup: ...
    @property
    def renderer(self) -> Renderer: ...
    @property
    def reward(self) -> Reward: ...
    def draw(self, number: int) -> PromptDraw: ...
    async def sync(self, version: int) -> None: ...


async def play(case: Case, world: World, stop_token_ids: tuple[int, ...] = ()) -> Played:
    """Run a case to its end."""
    loop = asyncio.get_running_loop()
    played = Played()
    config = SchedulingConfig(**case.scheduling)

    async def rollout_loop(
        draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        rollout = await generate_single_answer(draw, index, first_request, generate, renderer)
        played.natural += rollout.finish_reason == "stop" and first_request.request_id not in played.lengths
        played.lengths[first_request.request_id] = len(rollout.token_ids)
        return rollout

    def on_rollout(rollout: Rollout) -> None:
        assert rollout.reward is not None
        played.rewards[rollout.sample_id] = rollout.reward.value

    async def prepare(engine: InferenceEngine) -> None:
        raise RuntimeError(f"engine {engine.engine_id} died: a measurement with a replacement in it is none")

    router = Router(config.routing_policy, config.max_kv_used)
    proxy = LLMProxy(world.engines, prepare, router=router)
    replicate = config.replicate_prompts and config.type != "batch"
    scheduler = RolloutScheduler(
        proxy, {"bench": world.reward}, world.renderer, seed=0, replicate=replicate, loop=rollout_loop,
        on_rollout=on_rollout,
    )  # fmt: skip
    scheduler.lifecycle.add_listener(lambda event: played.events.append((str(event.rollout_id), str(event.after))))
    drawn = 0

    def draw(count: int, domain: str | None) -> Sequence[PromptDraw]:
        nonlocal drawn
        first, drawn = drawn, drawn + count
        return [world.draw(case.first_prompt + number) for number in range(first, first + count)]

    sampling = SamplingParams(
        max_new_tokens=case.max_new_tokens, temperature=case.temperature, stop_token_ids=stop_token_ids
    )
    doomed = partial(cannot_pass_filter, reward_range=(0.0, 1.0), **FILTERS) if config.reward_range else None
    spec = BatchSpec(
        draw=draw,
        plans=(SamplingPlan(purpose="train", group_size=case.group_size, sampling=sampling),),
        batch_size=case.prompts_per_step,
        num_steps=case.num_steps,
        get_rejection_reason=_left_out if case.filters else None,
        max_refills=20 if case.filters else 0,
        early_stop=doomed,
    )
    controller = AsyncController(scheduler, proxy, config, spec)
    began = loop.time()
    for step in range(1, case.num_steps + 1):
        at = loop.time()
        batch = await controller.next_batch()
        played.wait_s.append(loop.time() - at)
        groups = [group for group in batch.groups if group.draw.draw_id not in batch.rejection_reasons]
        rollouts = [rollout for group in groups for rollout in group.scored_rollouts]
        played.trained += len(rollouts)
        played.trained_tokens += sum(len(rollout.token_ids) for rollout in rollouts)
        if case.train_s:
            await asyncio.sleep(case.train_s)
            at = loop.time()
            async with controller.pause_for_update():
                await world.sync(step)
            played.sync_s.append(loop.time() - at)
        await controller.complete_step(step, {rollout.rollout_id for rollout in rollouts})
    played.total_s = loop.time() - began
    await controller.close()
    return played


def _left_out(group: Group) -> str:
    values = [rollout.reward.value for rollout in group.scored_rollouts if rollout.reward is not None]
    return find_filter_reason(np.array(values, np.float64), skip_zero_variance=True, **FILTERS)


def reward_latency_s(median_s: float, rollout: Rollout) -> float:
    """The same for the same rollout in every run: lognormal, sigma 0.5."""
    if not median_s:
        return 0.0
    law = LognormalDistribution(median=median_s, sigma=0.5).quantile_function()
    return law(draw_uniform(11, rollout.draw_id, rollout.index))


class Judge:
    """A reward that takes its time; its verdict is computed, or a recorded one."""

    def __init__(self, case: Case, recorded: Mapping[str, float] | None = None) -> None:
        self._case = case
        self._recorded = recorded

    async def __call__(self, rollout: Rollout) -> RewardResult:
        await asyncio.sleep(reward_latency_s(self._case.reward_s, rollout))
        if self._recorded is not None:
            return RewardResult(value=self._recorded.get(rollout.sample_id, 0.0))
        return RewardResult(value=float(is_correct(str(rollout.prompt.messages[0].text), rollout.text)))


class Limited:
    """An engine that says it runs fewer requests at once than it could."""

    def __init__(self, engine: Any, capacity: int) -> None:
        self._engine = engine
        self._capacity = capacity

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load(self) -> EngineLoad:
        return replace(self._engine.load(), capacity=self._capacity)


class LimitedEngines(EngineGroup):
    """Engines, as the proxy sees them."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self._engines = engines

    @property
    def engines(self) -> Sequence[Any]:
        return self._engines

    def add(self, engine_id: str, factory: Callable[[], InferenceEngine]) -> None:
        raise RuntimeError("no engine comes")

    async def retire(self, engine_id: str) -> None:
        raise RuntimeError("no engine goes")

    async def replace(self, engine_id: str) -> InferenceEngine:
        raise RuntimeError(f"engine {engine_id} died")

    async def stop(self, engine_id: str) -> None:
        raise RuntimeError(f"engine {engine_id} died")

    async def close(self) -> None:
        return None


class Draws:
    """Prompts as the model sees them."""

    def __init__(self) -> None:
        from roll.data import ChatRenderer
        from roll.models import load_tokenizer, resolve_model

        self.model_path = resolve_model("smollm2-135m-instruct")
        self.renderer = ChatRenderer(load_tokenizer(self.model_path))
        self._known: dict[tuple[str, int], PromptDraw] = {}

    def __call__(self, kind: str, number: int) -> PromptDraw:
        if (kind, number) not in self._known:
            message = Message(role="user", content=prompt_text(kind, number))
            prompt = Prompt(uid=f"bench/{kind}/{number}", domain="bench", messages=(message,))
            tokens = self.renderer.render([message])
            self._known[kind, number] = PromptDraw(draw_id=number, prompt=prompt, token_ids=tokens)
        return self._known[kind, number]


class Real:
    """vLLM engines of SmolLM2-135M, bf16, with the quickstart's settings; kept for many cases."""

    def __init__(self, num_engines: int) -> None:
        from roll.models import find_stop_token_ids

        self.draws = Draws()
        self.stop_token_ids = find_stop_token_ids(self.draws.model_path)
        self.num_engines = num_engines
        self._sender: Any = None
        self._update: Any = None
        self._group: Any = None

    @property
    def engines(self) -> Sequence[Any]:
        return self._group.engines

    async def start(self) -> None:
        from roll.cluster.local import LocalCluster

        self._group = await LocalCluster().start_engines(
            [
                EngineSpec(
                    engine_id=f"engine-{index}",
                    kind="vllm",
                    model_path=str(self.draws.model_path),
                    max_context=MAX_CONTEXT,
                    max_num_seqs=64,
                    kv_cache_bytes=KV_BYTES,
                    num_threads=2 // self.num_engines,
                    log_path=Path("runs/bench") / f"engine-{index}.log",
                )
                for index in range(self.num_engines)
            ],
            "actor_infer",
        )

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        await self._group.close()

    async def play(self, case: Case) -> Played:
        """Run a case on the engines; their prefix caches are empty at its beginning."""
        for engine in self.engines:
            await engine._llm.reset_prefix_cache()
            engine.take_steps()
        world = _RealWorld(self, case)
        played = await play(case, world, self.stop_token_ids)
        played.stretches = [stretch for engine in self.engines for stretch in engine.take_steps()]
        return played

    async def sync(self, version: int) -> None:
        """The model's own weights once more, through the production path."""
        import torch

        from roll.models import load_causal_lm
        from roll.weights.shared_memory import SharedMemorySender

        if self._sender is None:
            network = load_causal_lm(self.draws.model_path, torch.bfloat16)
            weights: Any = [(name, parameter.detach()) for name, parameter in network.named_parameters()]
            self._sender = SharedMemorySender()
            self._update = self._sender.stage(weights, 0)
        update = replace(self._update, policy_version=version)
        await asyncio.gather(*(engine.update_weights(update) for engine in self.engines))


class _RealWorld:
    def __init__(self, real: Real, case: Case) -> None:
        self._real, self._case = real, case
        self.engines = LimitedEngines([Limited(engine, case.max_num_seqs) for engine in real.engines])
        self.renderer = real.draws.renderer
        self.reward = Judge(case)

    def draw(self, number: int) -> PromptDraw:
        return self._real.draws(self._case.kind, number)

    async def sync(self, version: int) -> None:
        await self._real.sync(version)


class _SimulatedWorld:
    def __init__(self, case: Case, settings: EngineSettings, num_engines: int, draws: Draws, recorded: Played) -> None:
        def answer_tokens(request: GenerationRequest) -> int:
            return recorded.lengths.get(request.request_id, case.max_new_tokens)

        limits = replace(settings.limits, max_num_seqs=case.max_num_seqs)
        self.engines = SimulatedEngines([replace(settings, limits=limits)] * num_engines, answer_tokens)
        self.renderer = SimulatedRenderer()
        self.reward = Judge(case, recorded.rewards)
        self._draws, self._case = draws, case

    def draw(self, number: int) -> PromptDraw:
        return self._draws(self._case.kind, number)

    async def sync(self, version: int) -> None:
        await self.engines.sync(version)


def settings_of(fit: EngineFit, update_s: float = 0.0) -> EngineSettings:
    """A simulated engine that costs what a fit says."""
    base = build_measured_device(load_device("cpu"), load_model_sizes("smollm2-135m"), 1, fit)
    kv_capacity = int(KV_BYTES // load_model_sizes("smollm2-135m").kv_bytes_per_token)
    return EngineSettings(
        costs=compute_engine_costs(load_model_sizes("smollm2-135m"), base, 1),
        limits=BatchLimits(max_num_seqs=64, max_batched_tokens=4096, kv_capacity=kv_capacity),
        prefix_block=PREFIX_BLOCK,
        update_s=update_s,
    )


def save(path: Path, played: Played) -> None:
    """Keep a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(played)))


def load(path: Path) -> Played:
    """A run that was kept."""
    values = json.loads(path.read_text())
    stretches = [EngineStepSpan(**stretch) for stretch in values.pop("stretches")]
    return Played(**values, stretches=stretches)


WARM_UP = (
    Case(name="warm up", first_prompt=100_000, num_steps=1, max_new_tokens=48),
    Case(name="warm up", first_prompt=100_100, num_steps=1, max_new_tokens=24, max_num_seqs=5),
)
"""Before anything counts: memory is taken, kernels are chosen, batches of many sizes go by."""


async def measure(cases: Sequence[Case], num_engines: int, directory: Path) -> None:
    """Run cases on real engines, one after the other; each is kept as soon as it is over."""
    real = Real(num_engines)
    await real.start()
    try:
        for case in WARM_UP:
            await real.play(case)
        for _ in range(2 if any(case.train_s for case in cases) else 0):
            await real.sync(0)
        for case in cases:
            played = await real.play(case)
            save(directory / f"{case.name}.json", played)
            print(f"{case.name}: {played.total_s:.1f} s, {played.natural} of {len(played.lengths)} ended", flush=True)
    finally:
        await real.close()


def predict(case: Case, settings: EngineSettings, num_engines: int, draws: Draws, recorded: Played) -> Played:
    """The same case in virtual time, with the lengths and verdicts of a real run."""

    async def main() -> Played:
        return await play(case, _SimulatedWorld(case, settings, num_engines, draws, recorded))

    return clock.run(main())
