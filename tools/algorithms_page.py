"""Generate `docs/algorithms.md` from the presets:  python tools/algorithms_page.py docs/algorithms.md"""

from __future__ import annotations

import sys
from pathlib import Path

from roll.config.algorithm import AlgorithmConfig
from roll.config.presets import PRESET_NAMES, describe_preset, format_settings, load_preset, load_preset_note

__all__ = ["page"]

_HEAD = """\
# Algorithms

*Generated from the presets in `src/roll/config/presets/`: change them there.*

This page describes the RL algorithms of the pipelines `rlvr` and `agentic`: how to choose one, how each is defined, and
how to add your own. An algorithm in ROLL is a combination of independent parts. `algorithm.type` selects a preset,
which sets some of the keys of these parts. Every key in your file overrides the preset.

```yaml
algorithm: {type: dapo, gate: {high: 0.3}, kl: {coefficient: 0.001}}
```

| part | key | what it configures |
|---|---|---|
| reward | `algorithm.reward` | scaling, shifting and clipping of rewards; penalties for long or malformed answers |
| advantage | `algorithm.advantage` | baseline, std normalization, returns over tokens or turns, whitening |
| filters | `algorithm.filters` | which groups and rollouts are trained on; dynamic sampling |
| ratio | `algorithm.ratio` | level (token, chunk, sequence) and denominator of the importance ratio |
| gate | `algorithm.gate` | the surrogate objective of a token, such as PPO's clipped objective |
| aggregation | `algorithm.aggregation` | how token losses are averaged |
| correction | `algorithm.correction` | importance weights for the train-inference mismatch and for staleness |
| KL, entropy | `algorithm.kl`, `algorithm.entropy` | KL penalty relative to the reference; entropy bonus |
| updates | `algorithm.updates` | number of mini-batches and epochs per batch |
| critic | `algorithm.critic` | the value models of `advantage.estimator: gae` |
| credit | `algorithm.credit` | token-level credit from attention statistics |
| imitation | `algorithm.imitation` | demonstrations in addition to the policy's rollouts |

`roll config explain algorithm` and [Configuration](configuration.md) list all keys and the values that each preset
sets.

The formulas below use these symbols:

| symbol | meaning |
|---|---|
| pi, old | probability of a token in the trainer: current policy; policy before the update |
| mu (called `rollout` in keys) | probability of a token in the engine that sampled it |
| r | importance ratio pi / old, unless the preset defines another ratio |
| R, A | reward of an answer, and advantage of an answer or token |
| o_i | the i-th answer; bars around it mean its number of tokens; log pi(o_i) is the sum of its tokens' log-probs |
| G; n, N | number of answers in a group; number of answers in an update |
| mean_g, std_g | mean and standard deviation over a group |
| e; eps | clip range; a small constant |
| KL_k1, KL_k2, KL_k3 | estimators of the KL divergence from the reference model; beta is the coefficient |
| sg | stop-gradient: the value is treated as a constant |

The following conventions hold in every formula:

- R is the reward after shaping by `algorithm.reward`. Filters use the same reward, except with `filters.metric:
  accuracy`.
- With `kl.apply_to: reward`, R is the penalized reward, R - beta sum_t KL_t over an answer's tokens. The penalty is
  subtracted before baselines and standard deviations are computed. Filters ignore the penalty. With returns per turn or
  token (`rebn`; `reinforce_pp`, `remax`, `ppo`, `asy_ppo`), the KL of a turn or token is subtracted from the reward of
  that turn or token. For rollouts that are not trained on, no KL is computed; baselines use the mean penalty per token
  of the other rollouts instead.
- The length limit of an answer is `rollout.max_new_tokens` times the number of turns of its prompt.
- Log-ratios are clamped to ± 20 before they are exponentiated.
- Sums include only tokens that the policy generated.
- The normalizers N, n and sum |o_i| are counted over all samples of one update, so the gradient does not depend on
  micro-batches, packing, order, or ranks. They exclude filtered rollouts, but baselines include them. Rollouts with an
  infrastructure error are excluded from both.
- By default, each token is weighted by the importance weight old / mu, truncated at 2 (`correction`), unless the
  denominator of the ratio is already mu. The metrics `training/mismatch/…` and `agreement/…` always report the
  difference between old and mu, which consists of [mismatch and staleness](#mismatch-and-staleness).
- With `rollout.top_p` or `top_k`, the engine renormalizes probabilities over the tokens that it can sample, so old / mu
  is below 1 for every token. Ratios that are products over an answer are therefore not supported with these settings.
  `roll check` reports other consequences.

The benchmarks compare [all algorithms](benchmarks/algorithms.md) on the quickstart task, and [algorithms for multi-turn
episodes](benchmarks/multi_turn.md) on tasks with two turns.

## Which algorithm to choose
"""

_OWN = """\
## Demonstrations

With any preset, prompts can contain an expert's answer, which the policy imitates. This is most useful with `ipa`:

```yaml
data: [{source: file, path: sums.jsonl, reward: math, expert_key: solution}]
algorithm: {type: ipa, imitation: {weight: 1.0, when: unsolved}}
```

ROLL converts a demonstration to a rollout: it tokenizes the text, executes the actions in the environment (if there is
one), and scores the result with the same rewards. The objective of a demonstration's token is weight x G log pi, where
G is the return of the demonstration, discounted per turn if the estimator is defined on turns. Demonstrations are
excluded from baselines, filters and critic losses, and from KL penalties that are estimated from samples, because the
policy did not sample them. A demonstration with a reward of 0 is not used. With `when: unsolved`, a demonstration is
used only if no rollout of the policy reaches its reward. The metric `data/demonstrations` counts the demonstrations
that were used.

## Mismatch and staleness

A sampled token has log-probs under three policies: `rollout` is the engine that sampled the token, `behavior` is the
trainer with the same policy version, and `old` is the trainer before this update. In an asynchronous run, a rollout
that continued across weight syncs has tokens of several versions. For each token,

    log(old / rollout) = log(behavior / rollout) + log(old / behavior)
         both          =        mismatch         +      staleness

Mismatch is the numerical difference between engine and trainer with the same weights (kernels, dtypes, 8-bit weights,
`top_p`, and keys and values that an engine cached under older weights). Staleness is the change of the policy since
the token was sampled. The ratio old / rollout corrects both at once, so a single threshold bounds two different
quantities (arXiv 2605.12070, "missing old logits"). The following settings correct one of them or both:

| setting of `algorithm` | corrects | needs snapshots of older weights (described below) |
|---|---|---|
| `correction.corrects: both` (default), with any `level`, `upper`, mask and `veto` | both | no |
| `correction.corrects: mismatch` | mismatch | yes |
| `correction.corrects: staleness` | staleness | yes |
| `ratio.against: old` (default) | neither: the ratio only covers the updates of this step | no |
| `ratio.against: behavior` | staleness, within the clip range | yes |
| `ratio.against: rollout` | both, within the clip range | no |

The presets use the following ratios and corrections, with the level and the bound of the correction in parentheses.

{presets}

The exact decoupled objective clips the ratio over staleness and this step's updates, and corrects mismatch separately:

```yaml
algorithm: {type: grpo, ratio: {against: behavior}, correction: {corrects: mismatch}}
rollout: {scheduling: {async_ratio: 2}}
```

The trainer then copies its trained weights to host memory before each update, keeps the last ⌈`async_ratio`⌉ versions
(with LoRA, only the adapters), and computes the log-prob of each stale token with the version that sampled it. This
costs ⌈`async_ratio`⌉ copies of the weights and, for each older version in a batch, one forward pass over the rollouts
of this version. With `correction.snapshots: true`, snapshots are used only for the metrics.

`train_inference/mismatch/…` and `train_inference/staleness/…` measure the two parts separately. Without snapshots,
mismatch is measured only on the tokens of the current version, and staleness is not measured. A synchronous run has no
stale tokens, so the whole difference is mismatch.

Snapshots require the back-end `torch`. A resumed run restarts its unfinished rollouts, so it needs no older versions. A
replay starts without snapshots; `train_inference/known_share` is the fraction of tokens whose behavior log-prob is
known.

## A shared critic

With `critic: {shared: true}`, the policy's network has a value head, and no second model is loaded. One forward and one
backward pass compute `loss + critic.coefficient x value loss`. The head is initialized with zeros and has a separate
learning rate (`critic.head_learning_rate`). Checkpoints contain the head, but engines and exported models do not. A
shared critic needs one forward pass for the values before each update, and almost no additional memory.

```
roll train examples/quickstart.yaml algorithm.type=ppo algorithm.critic.shared=true
```

The table compares critics on the quickstart task (40 steps, answers of at most 16 tokens, seed 0). The error is the
RMSE between values and returns over the last 10 steps, and the final accuracy is measured on held-out prompts:

| critic | `coefficient` | critic's learning rate | steps to reward 0.8 | final accuracy | gradient norm | error |
|---|---|---|---|---|---|---|
| shared | 0.01 | 1e-4 | 21 | 0.969 | 3.1 | 0.23 |
| shared, default | 0.1 | 1e-4 | 22 | 0.958 | 3.0 | 0.21 |
| shared | 0.1 | 1e-3 | 23 | 0.958 | 3.5 | 0.29 |
| shared | 1 | 1e-4 | 22 | 0.969 | 6.3 | 0.28 |
| separate, default | not used | 1e-5 | 21 | 0.969 | 3.6 | 0.71 |
| separate | not used | 1e-4 | 22 | 0.948 | 3.6 | 0.27 |

In this comparison, the policy learns equally fast with every critic, and a shared critic's values are as accurate as a
separate critic's values. A coefficient of 1 doubles the gradient norm. Because `training.max_grad_norm` clips the
gradient of the summed losses, the contribution of the policy loss decreases. A learning rate of 1e-5, which is usual
for large models and long runs, is too low for a separate critic in so few steps: the mean of its values is 0.28, while
the mean return is 0.96. With `advantage.gae_lambda: 1`, whitening removes a constant error of the values. In short
runs, and with a smaller lambda, raise `critic.learning_rate` or `critic.num_epochs`, and compare `critic/value/mean`
with `critic/value/return`.

## Your own loss, advantage or gate

To use your own loss, advantage or gate (surrogate objective), set the import path or the file of the function or class.

`algorithm.advantage.function` names a function `def advantages(episodes: list[Episode]) -> list`, which returns one
number or one array [T] for each episode; see `roll.algorithms.episodes.Episode`. Reward shaping, filters, ratio, gate
and KL are configured as usual.

`algorithm.loss` names a function `def loss(inputs: LossInputs) -> LossOutputs`, which receives the loss tokens of one
micro-batch; see `roll.types.LossInputs`. The function must divide by the counts of the whole batch
(`inputs.num_tokens`, `inputs.num_sequences`), not by the counts of the micro-batch, so that the result does not depend
on how the batch is split. If the function needs more than log-probs from the trainer, set an attribute: `loss.needs =
LossRequirements(entropy=True)`, with `LossRequirements` from `roll.types`.

`algorithm.gate: {type: python, gate: "my_gate.py:Cubic", options: {strength: 0.5}}` names a class that implements the
surrogate objective. An instance is called with `(log_ratio, logprobs, advantages)`, each of shape [N], and returns the
objective of each token. Ratio, KL, entropy, correction and aggregation are configured as usual. `Gate` in
`roll.algorithms.gates` describes the optional members of the class.

An installed package can register a loss or a gate by name, with entry points of the groups `roll.losses` and
`roll.gates`.

`examples/algorithms/` contains an advantage and a loss. This command trains with them:

```
roll train examples/own_algorithm.yaml
```
"""


def page() -> str:
    """Return the whole page."""
    lines = [_HEAD, "| preset | when to use it | cost | stability |", "|---|---|---|---|"]
    for name in PRESET_NAMES:
        note = load_preset_note(name)
        lines.append(f"| [`{name}`](#{name}) | {note.use_case} | {note.cost} | {note.stability} |")
    for name in PRESET_NAMES:
        title, formula, text = describe_preset(name).split("\n\n", 2)
        body = text.strip().replace("\n", " ")
        keys = (
            ", ".join(f"`{text}`" for text in format_settings(load_preset(name)))
            or "no keys: all keys have their default values"
        )
        formula = "\n".join(line.removeprefix("    ") for line in formula.splitlines())
        lines += ["", f"## {name}", "", title, "", "```", formula, "```", "", body, "", f"The preset sets {keys}."]
    return "\n".join([*lines, "", _OWN.replace("{presets}", _corrections())])


def _corrections() -> str:
    """Return a table of the ratio and the correction of each preset."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in PRESET_NAMES:
        algorithm = AlgorithmConfig.model_validate({"type": name})
        rows.setdefault((_ratio_holds(algorithm), _corrected(algorithm)), []).append(f"`{name}`")
    table = [f"| {', '.join(names)} | {ratio} | {corrected} |" for (ratio, corrected), names in rows.items()]
    return "\n".join(["| preset | the ratio covers | the correction covers |", "|---|---|---|", *table])


def _ratio_holds(algorithm: AlgorithmConfig) -> str:
    if algorithm.gate.type == "log_prob":
        return "no ratio"
    return {"old": "the updates of the step", "behavior": "also staleness", "rollout": "also staleness and mismatch"}[
        algorithm.ratio.against
    ]


def _corrected(algorithm: AlgorithmConfig) -> str:
    correction = algorithm.correction
    acts = {
        "truncated at": correction.upper,
        "masked below": correction.mask_low,
        "masked above": correction.mask_high,
        "vetoed below": correction.veto,
    }
    said = ", ".join(f"{what} {bound:g}" for what, bound in acts.items() if bound is not None)
    return f"{correction.corrects} ({correction.level}, {said})" if said else "none"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
