"""No key below `algorithm` is dead: changing it alone changes what a step collects, computes, or starts.

Two steps go through the pipeline's own functions (the controller, `ReinforcementObjective.collect`, `learn`, the
trainers' specs). Behind them stand a loop that takes rollouts from a list, and trainers that write down what they are
asked to do, with the loss's value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import random_attempts, to_groups
from model_helpers import loss_inputs_of_batch
from worlds.tiny_model import write_tiny_model

from roll.config.algorithm import AlgorithmConfig
from roll.config.keys import Key, iterate_keys
from roll.config.pipelines.rlvr import RLVRConfig
from roll.data import ChatRenderer
from roll.models import load_tokenizer
from roll.pipelines.learner import Learner
from roll.pipelines.learning.state import LearningState
from roll.pipelines.learning.updates import learn
from roll.pipelines.reinforcement.objective import ReinforcementObjective, build_demonstration_player
from roll.pipelines.reinforcement.sampling import build_controller
from roll.pipelines.reinforcement.trainers import build_critic_specs, build_policy_spec, resolve_critic_path
from roll.pipelines.snapshots import PolicySnapshots
from roll.protocols import LossFn
from roll.rollout import RolloutScheduler, SamplingPlan
from roll.types import (
    AttentionRange,
    AttentionStatistics,
    FloatArray,
    ForwardOptions,
    GenerationRequest,
    Group,
    OutputName,
    PromptDraw,
    RewardResult,
    Rollout,
    SamplingParams,
    StepResult,
    TrainingBatch,
)

KEYS = {(key.dotted, variant): key for key in iterate_keys(AlgorithmConfig) for variant in key.variants or ("",)
        if not key.members}  # fmt: skip

SIZE = 3
"""Rollouts of a group."""

GAE = {"advantage.estimator": "gae", "advantage.mean": "none", "advantage.std": "none"}
SHARED = {**GAE, "critic.shared": True}
TWO_CRITICS = {**GAE, "critic.num_critics": 2}
TURNS = {"advantage.estimator": "turn"}
KL = {"kl.coefficient": 0.1}
TARGET = {**KL, "kl.target": 0.01}
TWICE = {"updates.num_epochs": 2}
CREDIT = {"credit.type": "coupled", "credit.share": 0.6, "credit.horizon_start": 1, "credit.horizon_end": 8}
SEQUENCE = {"ratio.level": "sequence", **TWICE}
ANY = {"filters.skip_zero_variance": False}


def gate(kind: str, **more: Any) -> dict[str, Any]:
    return {"gate.type": kind, **TWICE, **{f"gate.{name}": value for name, value in more.items()}}


CASES: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {
    ("type", ""): ({}, "dapo"),
    ("reward.scale", ""): ({"advantage.std": "none"}, 2.0),
    ("reward.shift", ""): ({"advantage.mean": "none"}, 0.5),
    ("reward.clip", ""): ({}, 0.5),
    ("reward.overlong_buffer", ""): ({}, 28),
    ("reward.overlong_penalty", ""): ({"reward.overlong_buffer": 28}, 0.5),
    ("reward.format_penalty", ""): ({}, 0.3),
    ("advantage.estimator", ""): ({}, "turn"),
    ("advantage.mean", ""): ({}, "leave_one_out"),
    ("advantage.std", ""): ({}, "running"),
    ("advantage.per_domain", ""): ({"advantage.mean": "batch"}, False),
    ("advantage.gamma", ""): (TURNS, 0.5),
    ("advantage.gae_lambda", ""): (GAE, 0.5),
    ("advantage.step_weight", ""): ({"advantage.estimator": "anchor_state"}, 0.5),
    ("advantage.whiten", ""): ({}, "token"),
    ("advantage.clip", ""): ({}, 0.5),
    ("advantage.function", ""): ({}, "OWN:advantages"),
    ("ratio.level", ""): (TWICE, "sequence"),
    ("ratio.reduce", ""): (SEQUENCE, "product"),
    ("ratio.against", ""): ({"correction.upper": None}, "rollout"),
    ("ratio.max_token_log_ratio", ""): (SEQUENCE, 0.05),
    ("gate.type", "min_clip"): (gate("soft"), "min_clip"),
    ("gate.low", "min_clip"): (gate("min_clip"), 0.05),
    ("gate.high", "min_clip"): (gate("min_clip"), 0.05),
    ("gate.type", "dual_clip"): (gate("soft"), "dual_clip"),
    ("gate.low", "dual_clip"): (gate("dual_clip"), 0.05),
    ("gate.high", "dual_clip"): (gate("dual_clip"), 0.05),
    ("gate.bound", "dual_clip"): (gate("dual_clip"), 1.05),
    ("gate.type", "stop_gradient"): (TWICE, "stop_gradient"),
    ("gate.lower", "stop_gradient"): (gate("stop_gradient"), 0.95),
    ("gate.upper", "stop_gradient"): (gate("stop_gradient"), 1.05),
    ("gate.mask", "stop_gradient"): (gate("stop_gradient", lower=0.95, upper=1.05), True),
    ("gate.type", "sign_split"): (TWICE, "sign_split"),
    ("gate.positive_weight", "sign_split"): (gate("sign_split"), 0.5),
    ("gate.negative_weight", "sign_split"): (gate("sign_split"), 0.5),
    ("gate.lower", "sign_split"): (gate("sign_split"), 0.95),
    ("gate.upper", "sign_split"): (gate("sign_split"), 0.95),
    ("gate.type", "none"): (TWICE, "none"),
    ("gate.type", "python"): (gate("soft", gate="OWN:Scaled"), "python"),
    ("gate.gate", "python"): (gate("python", gate="OWN:Scaled"), "OWN:Halved"),
    ("gate.options", "python"): (gate("python", gate="OWN:Scaled"), {"factor": 3.0}),
    ("gate.type", "log_prob"): (TWICE, "log_prob"),
    ("gate.type", "squared_penalty"): (TWICE, "squared_penalty"),
    ("gate.tau", "squared_penalty"): (gate("squared_penalty"), 1.0),
    ("gate.type", "soft"): (TWICE, "soft"),
    ("gate.tau_positive", "soft"): (gate("soft"), 2.0),
    ("gate.tau_negative", "soft"): (gate("soft"), 2.0),
    ("aggregation", ""): ({}, "token_mean"),
    ("kl.coefficient", ""): ({}, 0.1),
    ("kl.estimator", ""): (KL, "k2"),
    ("kl.apply_to", ""): (KL, "reward"),
    ("kl.target", ""): (KL, 0.01),
    ("kl.horizon", ""): (TARGET, 100),
    ("entropy.coefficient", ""): ({}, 0.1),
    ("entropy.drop_divergent", ""): ({**TWO_CRITICS, "entropy.coefficient": 0.1}, 0.5),
    ("correction.corrects", ""): ({}, "mismatch"),
    ("correction.snapshots", ""): ({}, True),
    ("correction.level", ""): ({}, "sequence"),
    ("correction.upper", ""): ({}, 1.01),
    ("correction.mask_low", ""): ({}, 0.9),
    ("correction.mask_high", ""): ({}, 1.1),
    ("correction.veto", ""): ({}, 0.8),
    ("filters.skip_zero_variance", ""): ({}, False),
    ("filters.metric", ""): ({"reward.format_penalty": 0.3}, "accuracy"),
    ("filters.min_mean", ""): ({}, 0.5),
    ("filters.max_mean", ""): ({}, 0.5),
    ("filters.min_std", ""): ({}, 0.5),
    ("filters.drop_unfinished", ""): ({}, True),
    ("filters.keep", ""): ({}, "positive"),
    ("filters.keep_num", ""): ({"filters.keep": "best"}, 1),
    ("filters.top_variance", ""): ({}, 0.3),
    ("filters.refill", ""): ({}, True),
    ("filters.max_refills", ""): ({"filters.refill": True, "filters.min_mean": 1.0}, 1),
    ("weights.difficulty", ""): ({}, True),
    ("weights.length", ""): ({}, True),
    ("updates.num_minibatches", ""): ({}, 2),
    ("updates.num_epochs", ""): ({}, 2),
    ("critic.model", ""): (GAE, "OTHER"),
    ("critic.num_critics", ""): (GAE, 2),
    ("critic.learning_rate", ""): (GAE, 1e-4),
    ("critic.value_clip", ""): ({**GAE, "critic.num_epochs": 2}, 0.01),
    ("critic.warmup_steps", ""): (GAE, 1),
    ("critic.num_epochs", ""): (GAE, 2),
    ("critic.drop_agreed", ""): (TWO_CRITICS, 0.5),
    ("critic.shared", ""): (GAE, True),
    ("critic.coefficient", ""): (SHARED, 0.5),
    ("critic.head_learning_rate", ""): (SHARED, 1e-3),
    ("credit.type", ""): ({}, "local"),
    ("credit.amplification", ""): (CREDIT, 2.0),
    ("credit.share", ""): (CREDIT, 0.2),
    ("credit.window", ""): (CREDIT, 3),
    ("credit.horizon_start", ""): (CREDIT, 3),
    ("credit.horizon_end", ""): (CREDIT, 4),
    ("credit.introduction_window", ""): (CREDIT, 1),
    ("credit.introduction_share", ""): (CREDIT, 0.9),
    ("credit.waad_quantile", ""): (CREDIT, 0.1),
    ("credit.jump_quantile", ""): (CREDIT, 0.0),
    ("imitation.weight", ""): ({}, 0.5),
    ("imitation.when", ""): ({}, "unsolved"),
    ("loss", ""): ({}, "OWN:loss"),
}
"""By key and kind of gate: what else must be set, and the other value."""

OWN = """
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scaled:
    factor: float = 2.0
    uses_ratio = True

    def __call__(self, log_ratio, logprobs, advantages):
        return self.factor * log_ratio.exp() * advantages

    def compute_clip_mask(self, ratio, advantages):
        return torch.zeros_like(ratio, dtype=torch.bool)


class Halved(Scaled):
    def __call__(self, log_ratio, logprobs, advantages):
        return 0.5 * log_ratio.exp() * advantages

import numpy as np
from roll.algorithms.inputs import LossOutputs

def advantages(episodes):
    return [episode.total - 0.25 for episode in episodes]

def loss(inputs):
    return LossOutputs(loss=-inputs.logprobs.sum() / inputs.num_tokens)
"""


def test_algorithm_keys_there_is_a_case_for_every_key() -> None:
    assert sorted(CASES) == sorted(KEYS)


@pytest.mark.parametrize(("dotted", "kind"), CASES, ids=lambda value: value)
def test_algorithm_keys_a_key_changes_the_result(dotted: str, kind: str, tmp_path: Path, tiny_model: Path) -> None:
    given, value = CASES[dotted, kind]
    key = KEYS[dotted, kind]
    before = {k: v for k, v in {**_default(key), **given}.items() if k != dotted or k in given}
    after = {**given, dotted: value}
    first, second = (run(config_of(keys, tmp_path, tiny_model), tiny_model) for keys in (before, after))
    assert first == run(config_of(before, tmp_path, tiny_model), tiny_model), "the same settings give the same"
    assert first != second


def _default(key: Key) -> dict[str, Any]:
    return {} if key.required or key.default is None else {key.dotted: key.default}


def config_of(keys: dict[str, Any], directory: Path, model: Path) -> RLVRConfig:
    (directory / "own.py").write_text(OWN)
    algorithm: dict[str, Any] = {}
    for dotted, value in keys.items():
        if dotted == "gate.gate" and keys["gate.type"] != "python":
            continue  # a gate of one's own comes with its type
        if isinstance(value, str) and value.startswith("OWN:"):
            value = f"{directory / 'own.py'}:{value[4:]}"
        if value == "OTHER":
            value = str(write_tiny_model(directory / "other", seed=5))
        section, _, name = dotted.rpartition(".")
        (algorithm.setdefault(section, {}) if section else algorithm)[name] = value
    return RLVRConfig.model_validate(
        {
            "name": "keys",
            "model": str(model),
            "algorithm": algorithm,
            "data": [{"source": "guess_number", "demonstrations": True}],
            "rollout": {"prompts_per_step": 5, "group_size": SIZE, "max_new_tokens": 16},
            "training": {"num_steps": 4},
        }
    )


def run(config: RLVRConfig, model: Path) -> list[Any]:
    """All that happens in two steps."""
    log: list[Any] = [
        repr(build_policy_spec(config, model)),
        repr(build_critic_specs(config, model)),
        str(resolve_critic_path(config, model)),
    ]
    num_critics = config.algorithm.num_critic_models
    answers = Answers()
    session: Any = SimpleNamespace(
        seed=config.seed,
        state=LearningState(data={}),
        spans=SimpleNamespace(phase=nothing),
        ledger=SimpleNamespace(record_draws=lambda draws, step: log.append([d.draw_id for d in draws])),
        mid_update=False,
        has_trained=False,
    )
    learner: Any = Learner(
        policy=Recorder("policy", 0, log),
        critics=tuple(Recorder("critic", i, log) for i in range(num_critics)),
        reference=Recorder("reference", 0, log) if config.algorithm.uses_reference else None,
    )
    if config.algorithm.uses_snapshots:
        learner = replace(learner, snapshots=PolicySnapshots(learner.policy, 1))
    asyncio.run(two_steps(config, session, learner, answers, ChatRenderer(load_tokenizer(str(model)))))
    return [*log, session.state.kl_coefficient]


async def two_steps(config: RLVRConfig, session: Any, learner: Any, answers: Answers, renderer: ChatRenderer) -> None:
    proxy: Any = answers
    rewards = dict.fromkeys(("d", "d0", "d1"), answers.reward)
    generation: Any = SimpleNamespace(
        proxy=proxy,
        scheduler=RolloutScheduler(proxy, rewards, renderer, seed=0, loop=answers.loop),
        rewards=rewards,
        renderer=renderer,
        wait_phases=SimpleNamespace(measure_wait=nothing),
    )
    plan = SamplingPlan(purpose="train", group_size=SIZE, sampling=SamplingParams(max_new_tokens=4))
    data: Any = SimpleNamespace(train=Prompts())
    controller = build_controller(config, session.state, data, session.ledger, generation, plan)
    engines: Any = SimpleNamespace(generation=generation, plan=plan, measure_wait=nothing)
    parts: Any = SimpleNamespace(
        config=config, run=session, batches=controller, policy_engines=engines, is_asynchronous=False
    )
    objective: Any = ReinforcementObjective(online=parts, get_demonstrations=build_demonstration_player(parts))
    for _ in range(2):
        collected = await objective.collect(await controller.next_batch())
        await learn(session, learner, config.algorithm, collected.choice, config.rollout)
        objective.update_state(collected)
        session.state.step += 1
        session.state.policy_version += 1  # the second step's tokens are stale
        await controller.complete_step(0, {rollout.rollout_id for rollout in collected.rollouts})
    await controller.close()


@contextmanager
def nothing(name: str) -> Iterator[None]:
    yield


@cache
def all_groups() -> tuple[Group, ...]:
    """Conversations of two domains, some groups without variance; some prompts have a demonstration."""
    attempts = []
    for seed in range(40):
        kind = ("multi_turn", "many_domains", "zero_variance", "ragged")[seed % 4]
        for a in random_attempts(seed, kind):
            group = 100 * seed + a.group
            attempts.append(replace(a, group=group, domain=f"d{group % 2}"))
    large = {a.group for a in attempts if a.index == SIZE - 1}
    attempts = [a for a in attempts if a.group in large and a.index < SIZE]
    ids = {group: i for i, group in enumerate(dict.fromkeys(a.group for a in attempts))}
    assert len(ids) > 50
    groups = to_groups([replace(a, group=ids[a.group]) for a in attempts])
    return tuple(with_demonstration(group) if group.draw.draw_id % 2 else group for group in groups)


def with_demonstration(group: Group) -> Group:
    prompt = replace(group.draw.prompt, expert=("an answer",))
    return replace(group, draw=replace(group.draw, prompt=prompt))


class Prompts:
    """Every draw in order."""

    def __init__(self) -> None:
        self._waiting = all_groups()

    def draw(self, n: int, domain: str | None) -> list[PromptDraw]:
        assert domain is None
        drawn, self._waiting = self._waiting[:n], self._waiting[n:]
        return [group.draw for group in drawn]


class Answers:
    """All rollouts and their rewards, ready; also the proxy that none of them needs."""

    num_running = num_waiting = 0

    def __init__(self) -> None:
        self._groups = {group.draw.draw_id: group for group in all_groups()}

    async def loop(
        self, draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Any, renderer: Any
    ) -> Rollout:
        await generate(first_request)
        return replace(self._groups[draw.draw_id].rollouts[index], reward=None)

    async def generate(self, request: GenerationRequest, *, on_start: Any, **_: Any) -> None:
        on_start("engine")

    async def wait_for_orphaned_requests(self) -> None: ...

    async def reward(self, rollout: Rollout) -> RewardResult:
        """Demonstrations get more than some of the policy's rollouts, less than others."""
        if rollout.expert:
            return RewardResult(value=0.5)
        reward = self._groups[rollout.draw_id].rollouts[rollout.index].reward
        assert reward is not None
        return reward


class Recorder:
    """A trainer whose policy moves a little with every update, and which writes down what it was asked."""

    def __init__(self, role: str, index: int, log: list[Any]) -> None:
        self.role, self.index, self.log, self.updates = role, index, log, 0

    def _numbers(self, batch: TrainingBatch, scale: float, salt: int) -> list[FloatArray]:
        result = []
        for sample in batch.samples:
            rng = np.random.default_rng([salt, self.index, *map(ord, sample.sample_id)])
            result.append((scale * rng.normal(size=len(sample))).astype(np.float32))
        return result

    async def forward(
        self,
        batch: TrainingBatch,
        outputs: Sequence[OutputName],
        options: ForwardOptions | None = None,
    ) -> dict[OutputName, list[Any]]:
        options = options or ForwardOptions()
        attention, version = options.attention, options.version
        if version is not None:
            self.log.append((self.role, "scores with version", version))
        said: dict[OutputName, list[Any]] = {"logprobs": self._logprobs(batch), "values": self._values(batch)}
        if attention is not None:
            said["attention"] = self._attention(batch, attention)
        return {name: said[name] for name in outputs}

    async def keep_snapshot(self, version: int, versions: Sequence[int]) -> None:
        self.log.append((self.role, "keeps", version, list(versions)))

    def _logprobs(self, batch: TrainingBatch) -> list[FloatArray]:
        shift = 0.3 if self.role == "reference" else 0.15 * self.updates
        base = [s.rollout_logprobs for s in batch.samples]
        near, away = self._numbers(batch, 0.3, 1), self._numbers(batch, shift, 2 + self.updates)
        return [b + x + y for b, x, y in zip(base, near, away, strict=True)]

    def _values(self, batch: TrainingBatch) -> list[FloatArray]:
        return self._numbers(batch, 0.5 + 0.1 * self.updates, 3)

    def _attention(self, batch: TrainingBatch, of: AttentionRange) -> list[AttentionStatistics]:
        far = [np.abs(x) for x in self._numbers(batch, 6.0, 4)]
        near = [np.abs(x) for x in self._numbers(batch, 1.0, 10 * of.horizon[0] + of.horizon[1])]
        pairs = zip(far, near, strict=True)
        return [AttentionStatistics(waad=np.minimum(w, np.float32(of.window)), fai=f) for w, f in pairs]

    async def train_step(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        current = self._logprobs(batch)
        values = self._values(batch)
        observed = loss.needs.attention
        if observed is not None and batch.samples[0].attention is None:
            seen = zip(batch.samples, self._attention(batch, observed), strict=True)
            batch = replace(batch, samples=tuple(replace(s, attention=own) for s, own in seen))
        inputs = loss_inputs_of_batch(batch, current, values, [np.abs(x) for x in self._numbers(batch, 1.0, 5)])
        outputs = loss(inputs)
        moving = inputs.values if self.role == "critic" else inputs.logprobs
        assert moving is not None
        assert inputs.values is not None
        gradients = torch.autograd.grad(outputs.loss, (moving, inputs.values), allow_unused=True)
        self.log.append((self.role, self.index, [s.sample_id for s in batch.samples]))
        self.log.append((outputs.loss.item(), [None if g is None else g.tolist() for g in gradients]))
        self.updates += 1
        metrics = {name: value.item() for name, value in outputs.metrics.items()}
        return StepResult(
            loss=outputs.loss.item(), grad_norm=1.0, learning_rate=1.0, num_tokens=1, num_loss_tokens=1, stepped=True,
            metrics=metrics,
        )  # fmt: skip
