"""Every named method, written from its paper: advantages, loss, and which rollouts are trained.

Nothing is read from ROLL's presets or configuration: a constant that differs there makes a test fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import reference_advantages as ref
import reference_loss as paper
from reference_advantages import Attempt, ByToken
from reference_credit import PRESET as CREDIT
from reference_credit import reference_factors

Advantages = Callable[[list[Attempt], list[Attempt]], ByToken]
"""(all scored rollouts, those that are trained) -> a value for each written token of the latter."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A named method."""

    advantages: Advantages
    loss: paper.Loss
    skips_equal_groups: bool = True
    positive_only: bool = False
    kl_in_reward: bool = False
    """Whether the paper has its penalty there."""
    penalised: Literal["answer", "turn", "token"] = "answer"
    """Whose reward a penalty in the reward lowers: see `with_kl_rewards`."""
    uses_credit: bool = False
    agreement: tuple[float, float] | None = None
    """AsyPPO: fraction of tokens without advantage, and without entropy bonus."""

    def trained(self, attempts: list[Attempt]) -> list[Attempt]:
        """Rollouts that are trained, in order."""
        result = []
        for a in attempts:  # as they were before any penalty
            group = ref.group_of(a, attempts)
            equal = ref.all_equal([b.total for b in group])
            if self.skips_equal_groups and equal:
                continue
            if a.written and not (self.positive_only and a.total <= 0):
                result.append(a)
        return result

    def answers(self, attempts: list[Attempt], beta_in_reward: float = 0.0) -> list[paper.Answer]:
        """What the loss sees of a step's rollouts; with a KL penalty in the reward if it has a coefficient."""
        trained = self.trained(attempts)
        if beta_in_reward:
            names = {a.name for a in trained}
            attempts = with_kl_rewards(attempts, beta_in_reward, self.penalised, names)
            trained = [a for a in attempts if a.name in names]
        advantages = self.advantages(attempts, trained)
        agreed, divergent = self._masks(trained)
        result = []
        for a in trained:
            own = [0.0 if drop else x for x, drop in zip(advantages[a.name], agreed[a.name], strict=True)]
            if self.uses_credit:
                mask = [t in set(a.written) for t in range(a.length)]
                factors = reference_factors(a.waad, a.fai, mask, CREDIT)
                own = [x * factors[t] for x, t in zip(own, a.written, strict=True)]
            result.append(
                paper.Answer(
                    new=[a.new[t] for t in a.written],
                    held=[a.new[t] for t in a.written],
                    old=[a.old[t] for t in a.written],
                    rollout=[a.rollout[t] for t in a.written],
                    ref=[a.ref[t] for t in a.written],
                    entropy=[a.entropy[t] for t in a.written],
                    gets_bonus=[not drop for drop in divergent[a.name]],
                    chunks=[k for k, turn in enumerate(a.turns) for _ in range(turn.start, turn.end)],
                    advantages=own,
                    expert=a.expert,
                )
            )
        return result

    def _masks(self, trained: list[Attempt]) -> tuple[dict[str, list[bool]], dict[str, list[bool]]]:
        if self.agreement is None:
            none = {a.name: [False] * len(a.written) for a in trained}
            return none, none
        spread = ref.critic_deviations(trained)
        turned = {name: [-x for x in array] for name, array in spread.items()}
        return ref.lowest(spread, self.agreement[0]), ref.lowest(turned, self.agreement[1])

    def with_kl(self, beta: float) -> Method:
        """With its paper's KL penalty switched on, where that lies in the loss."""
        return self if self.kl_in_reward else replace(self, loss=replace(self.loss, beta=beta))


def with_kl_rewards(
    attempts: Sequence[Attempt], beta: float, whose: Literal["answer", "turn", "token"], known: set[str]
) -> list[Attempt]:
    """R - beta sum_t (log old - log reference), before anything is done to the reward.

    `answer`: one reward has the sum over all its tokens (RLOO, arXiv 2402.14740 section 2; GRPO with the penalty in the
    reward). `turn` and `token`: every turn's, or token's, has its own (REINFORCE++, arXiv 2501.03262 eq. 3; ReMax,
    arXiv 2310.10505, whose greedy baseline has none). Of rollouts that are not `known`, because they are not trained,
    every token has the mean of those that are.
    """
    differences = {a.name: {t: a.old[t] - a.ref[t] for t in a.written} for a in attempts}
    together = [x for a in attempts if a.name in known for x in differences[a.name].values()]
    result = []
    for a in attempts:
        own = differences[a.name] if a.name in known else dict.fromkeys(a.written, ref.mean(together or [0.0]))
        rewards = [-beta * own.get(t, 0.0) for t in range(a.length)]
        if whose == "answer":
            result.append(replace(a, reward=a.reward + sum(rewards)))
        else:
            result.append(replace(a, token_rewards=rewards))
    return result


def everywhere(outcome: Callable[..., dict[str, float]]) -> Advantages:
    """One value per rollout for all of its tokens."""
    return lambda attempts, trained: ref.same_for_all_tokens(outcome(attempts), trained)


def token_returns_whitened(attempts: list[Attempt], trained: list[Attempt]) -> ByToken:
    return ref.whitened(ref.token_returns(ref.raw(attempts, ref.reward_of), trained, 1.0))


def baseline_whitened(attempts: list[Attempt], trained: list[Attempt]) -> ByToken:
    return ref.whitened(ref.same_for_all_tokens(ref.group_centred(attempts), attempts))


def gae_whitened(attempts: list[Attempt], trained: list[Attempt]) -> ByToken:
    return ref.whitened(ref.gae(ref.raw(attempts, ref.reward_of), trained, 1.0, 1.0)[0])


def episode_and_step(attempts: list[Attempt], trained: list[Attempt]) -> ByToken:
    episode = ref.group_scored(attempts, lambda a: a.total + sum(a.token_rewards))
    step = ref.anchor_state(attempts, 0.95)
    turns = {a.name: [episode[a.name] + 1.0 * s for s in step[a.name]] for a in trained}
    return ref.spread_over_tokens(turns, trained, later=False)


def turn_returns_whitened(attempts: list[Attempt], trained: list[Attempt]) -> ByToken:
    returns = ref.whitened(ref.turn_returns(ref.raw(attempts, ref.reward_of), attempts, 0.9))
    return ref.spread_over_tokens(returns, trained, later=False)


def chunk_returns(attempts: list[Attempt], trained: list[Attempt]) -> ByToken:
    centred = ref.group_centred(attempts)
    returns = {a.name: [0.95 ** (len(a.turns) - 1 - k) * centred[a.name] for k in range(len(a.turns))] for a in trained}
    return ref.spread_over_tokens(returns, trained)


CLIP = paper.ppo(0.2, 0.2)
ANSWERS = paper.Loss(objective=CLIP)
TOKENS = paper.Loss(objective=CLIP, over="tokens")
REINFORCE = paper.Loss(objective=paper.log_prob, over="sums")
GSPO = paper.Loss(objective=paper.ppo(3e-4, 4e-4), correction=paper.Correction(level="geometric"))
FROM_ENGINE: Any = {"against": "rollout", "correction": paper.Correction(upper=None)}
"""The behaviour policy is the engine's: its ratio is the only importance weight."""
GRPO = everywhere(ref.group_scored)

METHODS: dict[str, Method] = {
    # 2402.03300 eq. 3
    "grpo": Method(advantages=GRPO, loss=ANSWERS),
    # 2503.20783
    "dr_grpo": Method(advantages=everywhere(ref.group_centred), loss=replace(ANSWERS, over="longest")),
    # 2402.14740
    "rloo": Method(advantages=everywhere(ref.leave_one_out), loss=REINFORCE),
    "reinforce": Method(advantages=everywhere(ref.batch_centred), loss=REINFORCE, skips_equal_groups=False),
    # 2501.03262
    "reinforce_pp": Method(
        advantages=token_returns_whitened,
        loss=replace(TOKENS, kl="k1"),
        skips_equal_groups=False,
        kl_in_reward=True,
        penalised="token",
    ),
    "reinforce_pp_baseline": Method(advantages=baseline_whitened, loss=replace(TOKENS, kl="k2")),
    # 2310.10505
    "remax": Method(
        advantages=everywhere(ref.against_greedy), loss=REINFORCE, skips_equal_groups=False, penalised="token"
    ),
    # 2505.23585
    "opo": Method(advantages=everywhere(ref.length_weighted), loss=REINFORCE),
    # 2504.11343
    "raft_pp": Method(advantages=everywhere(ref.raw), loss=ANSWERS, skips_equal_groups=False, positive_only=True),
    # 2503.14476
    "dapo": Method(advantages=GRPO, loss=replace(TOKENS, objective=paper.ppo(0.2, 0.28))),
    # 2508.08221
    "lite_ppo": Method(advantages=everywhere(ref.group_centred_over_batch_std), loss=TOKENS),
    # 2507.18071
    "gspo": Method(advantages=GRPO, loss=replace(GSPO, ratio="sequence")),
    "gspo_token": Method(advantages=GRPO, loss=replace(GSPO, ratio="sequence_token")),
    # 2507.20673
    "gmpo": Method(
        advantages=GRPO, loss=replace(GSPO, objective=paper.ratio_alone, ratio="sequence", max_token_log_ratio=0.4)
    ),
    # 2506.13585
    "cispo": Method(advantages=GRPO, loss=replace(TOKENS, objective=paper.weighted_log_prob(0.0, 3.0), **FROM_ENGINE)),
    # 2510.11345
    "tis": Method(advantages=GRPO, loss=replace(ANSWERS, objective=paper.weighted_log_prob(0.0, 1.0), **FROM_ENGINE)),
    # 2503.14286, 2510.11345
    "topr": Method(advantages=GRPO, loss=replace(ANSWERS, objective=paper.by_sign(1.0, 1.0, 0.0, 1.0), **FROM_ENGINE)),
    "weighted_topr": Method(
        advantages=GRPO, loss=replace(ANSWERS, objective=paper.by_sign(1.0, 0.5, 0.0, 1.0), **FROM_ENGINE)
    ),
    # 2505.24298
    "decoupled_ppo": Method(advantages=GRPO, loss=replace(ANSWERS, correction=paper.Correction(upper=5.0))),
    # 1912.09729
    "dual_clip": Method(advantages=GRPO, loss=replace(ANSWERS, objective=paper.dual_clip(0.2, 0.2, 3.0))),
    # 2511.20347
    "sapo": Method(advantages=GRPO, loss=replace(ANSWERS, objective=paper.soft(1.0, 1.05))),
    # 2501.12599
    "kimi15": Method(
        advantages=everywhere(ref.group_centred), loss=replace(ANSWERS, objective=paper.squared_penalty(0.1))
    ),
    # 1707.06347, 1506.02438
    "ppo": Method(advantages=gae_whitened, loss=TOKENS, skips_equal_groups=False, penalised="token"),
    # 2510.01656
    "asy_ppo": Method(
        advantages=gae_whitened,
        loss=replace(ANSWERS, eta=0.001),
        skips_equal_groups=False,
        agreement=(0.2, 0.2),
        penalised="token",
    ),
    # 2504.20073
    "star_po": Method(advantages=GRPO, loss=TOKENS),
    # 2505.10978
    "gi_gpo": Method(advantages=episode_and_step, loss=ANSWERS, skips_equal_groups=False, penalised="token"),
    # 2510.01051
    "rebn": Method(advantages=turn_returns_whitened, loss=REINFORCE, skips_equal_groups=False, penalised="turn"),
    # 2512.24873
    "ipa": Method(
        advantages=chunk_returns,
        loss=paper.Loss(
            objective=paper.by_sign(1.0, 1.0, 0.0, 1.0),
            ratio="chunk",
            against="rollout",
            over="tokens",
            correction=paper.Correction(level="chunk", upper=None, high=1.2),
        ),
    ),
    # 2510.13554
    "attention_credit": Method(advantages=GRPO, loss=ANSWERS, uses_credit=True),
}
