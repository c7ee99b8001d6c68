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

This page describes the RL algorithms of the pipelines `rlvr` and `agentic`: how to choose one, what each computes, and
how to add your own. An algorithm in ROLL is a combination of independent parts. `algorithm.type` names a preset, which
sets some of their keys. A preset is only a starting point: every key in your file overrides the same key of the preset.

```yaml
algorithm: {type: dapo, gate: {high: 0.3}, kl: {coefficient: 0.001}}
```

| part | key | what it sets |
|---|---|---|
| reward | `algorithm.reward` | scaling, shifting and clipping of rewards; penalties for long or malformed answers |
| advantage | `algorithm.advantage` | baseline, std normalization, returns over tokens or turns, whitening |
| filters | `algorithm.filters` | which groups and rollouts are used for training; replacing filtered prompts |
| ratio | `algorithm.ratio` | whether probability ratios are taken per token, per chunk, or per answer |
| gate | `algorithm.gate` | how ratio and advantage become an objective, for example with a clip |
| aggregation | `algorithm.aggregation` | how the token losses are averaged |
| correction | `algorithm.correction` | importance-sampling correction if engine and trainer probabilities differ |
| KL, entropy | `algorithm.kl`, `algorithm.entropy` | penalty for divergence from the reference; bonus for entropy |
| updates | `algorithm.updates` | number of mini-batches, and of passes over each batch |
| critic | `algorithm.critic` | the value models of `advantage.estimator: gae` |
| credit | `algorithm.credit` | whether attention statistics weight the advantages of tokens |
| imitation | `algorithm.imitation` | demonstrations in addition to the policy's own rollouts |

`roll config explain algorithm` and [Configuration](configuration.md) list all keys and the values that each preset
sets.

The formulas below use these symbols:

| symbol | meaning |
|---|---|
| pi, old | probability of a token under the current policy, and under the trainer's policy before the update |
| mu (called `rollout` in keys) | probability of a token under the engine's policy, which sampled it |
| r | probability ratio pi / old; some presets define another ratio |
| R, A | reward of an answer, and advantage of an answer or token |
| o_i | the i-th answer; bars around it mean its number of tokens; log pi(o_i) is the sum of its tokens' log-probs |
| G; n, N | number of answers in a group; number of answers in an update |
| mean_g, std_g | mean and standard deviation over a group |
| e; eps | clip range; a small constant |
| KL_k1, KL_k2, KL_k3 | estimators of the KL divergence from the reference model; beta is the coefficient |
| sg | stop-gradient: the value is treated as a constant |

The following conventions hold in every formula:

- R is the reward after shaping by `algorithm.reward`. Filters use the same reward, unless `filters.metric` is
  `accuracy`.
- With `kl.apply_to: reward`, R is the penalized reward, R - beta sum_t KL_t over an answer's tokens. The penalty is
  subtracted before the baseline and the standard deviation are computed; filters ignore it. If turns or tokens have
  their own returns (`rebn`; `reinforce_pp`, `remax`, `ppo`, `asy_ppo`), the KL of each turn or token is subtracted from
  its own reward. No KL is computed for rollouts that are not used for training. In baselines, each of their tokens gets
  the mean penalty per token of the rollouts that are used for training.
- The length limit of an answer is `rollout.max_new_tokens` times the number of turns of its prompt.
- Log-ratios are clamped to ± 20 before they are exponentiated.
- Sums cover only the tokens that the policy generated.
- Counts cover all samples of one update, so the gradient does not depend on micro-batches, packing, order, or ranks.
  Baselines include filtered rollouts, but these counts do not. Rollouts with an infrastructure error are excluded from
  both.
- The correction for the difference between `old` and `mu` is on by default (`correction`: per token, truncated at 2),
  unless the ratio already has the engine's probabilities as its denominator. The metrics `training/mismatch/…` and
  `agreement/…` always report the difference. It consists of mismatch and staleness; see [Mismatch and
  staleness](#mismatch-and-staleness).
- With `rollout.top_p` or `top_k`, the engine normalizes probabilities over the tokens that it can sample, so old / mu
  is below 1 at every token. ROLL therefore does not support ratios that are products over an answer in this case.
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
one), and scores the result with the same rewards. The objective of its tokens is weight x G log pi, where G is the
return of the demonstration. G is discounted per turn if the estimator works on turns. Demonstrations are excluded from
baselines, filters and critic losses, and from KL penalties that are estimated from samples, because the policy did not
sample them. A demonstration with a reward of 0 is not used. With `when: unsolved`, a demonstration is used only if no
rollout of the policy got the same reward. The metric `data/demonstrations` counts the demonstrations that were used.

## Mismatch and staleness

A sampled token has log-probs under three policies: `rollout` is the engine that sampled the token, `behavior` is the
trainer with the same policy version, and `old` is the trainer before this update. In an asynchronous run, a rollout
that continued across weight syncs has tokens of several versions. For each token,

    log(old / rollout) = log(behavior / rollout) + log(old / behavior)
         both          =        mismatch         +      staleness

Mismatch is the numerical difference between engine and trainer with the same weights (kernels, dtypes, 8-bit weights,
`top_p`, and keys and values that an engine cached under older weights). Staleness is the change of the policy since
the token was sampled. The ratio old / rollout corrects both at once, so a single threshold bounds two different
quantities (arXiv 2605.12070, "missing old logits"). The following settings correct one part or both:

| setting of `algorithm` | what it corrects | needs snapshots of older weights (described below) |
|---|---|---|
| `correction.corrects: both` (default), with any `level`, `upper`, mask and `veto` | both | no |
| `correction.corrects: mismatch` | mismatch | yes |
| `correction.corrects: staleness` | staleness | yes |
| `ratio.against: old` (default) | neither: the ratio contains only the updates of this step | no |
| `ratio.against: behavior` | staleness, inside the clip | yes |
| `ratio.against: rollout` | both, inside the clip or the gate's bounds | no |

The presets use the following ratios and corrections. The parentheses contain the level of the correction and its bound.

{presets}

The exact decoupled objective clips staleness and this step's updates together, and corrects mismatch separately:

```yaml
algorithm: {type: grpo, ratio: {against: behavior}, correction: {corrects: mismatch}}
rollout: {scheduling: {async_ratio: 2}}
```

The trainer then copies its trained weights to host memory before each update, keeps the last ⌈`async_ratio`⌉ versions
(with LoRA, only their adapters), and scores each stale token with the version that sampled it. This costs
⌈`async_ratio`⌉ copies of the weights and, for each older version in a batch, one forward pass over the rollouts of
this version. With `correction.snapshots: true`, snapshots are used only for the metrics.

`train_inference/mismatch/…` and `train_inference/staleness/…` measure the two parts separately. Without snapshots,
mismatch is measured only on the tokens of the current version, and staleness is not measured. A synchronous run has no
stale tokens, so the whole difference is mismatch.

Snapshots need the back-end `torch`. A resumed run starts its unfinished rollouts again, so it needs no older versions.
A replay begins without snapshots; `train_inference/known_share` is the fraction of tokens whose version is known.

## A shared critic

With `critic: {shared: true}`, the policy's network has a value head, and no second model is loaded. One forward and one
backward pass compute `loss + critic.coefficient x value loss`. The head is initialized with zeros and has its own
learning rate (`critic.head_learning_rate`). Checkpoints contain the head, but engines and exported models do not. A
shared critic needs one forward pass for the values before each update, and almost no additional memory.

```
roll train examples/quickstart.yaml algorithm.type=ppo algorithm.critic.shared=true
```

The table compares critics on the quickstart task (40 steps, answers of at most 16 tokens, seed 0). The error is the
root mean square of value minus return over the last 10 steps, and the final accuracy is measured on held-out prompts:

| critic | `coefficient` | critic's learning rate | steps to reward 0.8 | final accuracy | gradient norm | error |
|---|---|---|---|---|---|---|
| shared | 0.01 | 1e-4 | 21 | 0.969 | 3.1 | 0.23 |
| shared, default | 0.1 | 1e-4 | 22 | 0.958 | 3.0 | 0.21 |
| shared | 0.1 | 1e-3 | 23 | 0.958 | 3.5 | 0.29 |
| shared | 1 | 1e-4 | 22 | 0.969 | 6.3 | 0.28 |
| separate, default | not used | 1e-5 | 21 | 0.969 | 3.6 | 0.71 |
| separate | not used | 1e-4 | 22 | 0.948 | 3.6 | 0.27 |

In this comparison, the learning speed of the policy does not depend on the critic, and the values of a shared critic
are as good as those of a separate critic. A coefficient of 1 doubles the gradient norm. Because
`training.max_grad_norm` limits the gradient of both losses together, the policy's share of the gradient decreases. A
learning rate of 1e-5, which is usual for large models and long runs, is too low for a separate critic in so few steps:
the mean of its values is 0.28, while the mean return is 0.96. With `advantage.gae_lambda: 1`, whitening removes an
error that is equal for all tokens. In short runs, and with a smaller lambda, raise `critic.learning_rate` or
`critic.num_epochs`, and compare `critic/value/mean` with `critic/value/return`.

## Your own loss, advantage or gate

To use your own loss, advantage or gate, name the function or class by its import path or its file.

`algorithm.advantage.function` names a function `def advantages(episodes: list[Episode]) -> list`, which returns one
number or one array [T] for each episode; see `roll.algorithms.episodes.Episode`. Reward shaping, filters, ratio, gate
and KL stay as configured.

`algorithm.loss` names a function `def loss(inputs: LossInputs) -> LossOutputs`, which receives the loss tokens of one
micro-batch; see `roll.types.LossInputs`. The function must divide by the counts of the whole batch
(`inputs.num_tokens`, `inputs.num_sequences`), not by the counts of the micro-batch, so that the result does not depend
on how the batch is split. If it needs more than log-probs from the trainer, declare this in an attribute:
`loss.needs = Needs(entropy=True)`, with `Needs` from `roll.types`.

`algorithm.gate: {type: python, gate: "my_gate.py:Cubic", options: {strength: 0.5}}` names a class whose instances
replace the gate. An instance is called with `(log_ratio, logprobs, advantages)`, each of shape [N], and returns the
objective of each token. Ratio, KL, entropy, correction and aggregation stay as configured. `Gate` in
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
    lines = [_HEAD, "| preset | when to use it | trained models, or additional work | stability |", "|---|---|---|---|"]
    for name in PRESET_NAMES:
        note = load_preset_note(name)
        lines.append(f"| [`{name}`](#{name}) | {note.use_case} | {note.cost} | {note.stability} |")
    for name in PRESET_NAMES:
        title, formula, text = describe_preset(name).split("\n\n", 2)
        body = text.strip().replace("\n", " ")
        keys = (
            ", ".join(f"`{text}`" for text in format_settings(load_preset(name)))
            or "no keys, because it has the default values"
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
    return "\n".join(["| preset | what the ratio contains | what the correction corrects |", "|---|---|---|", *table])


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
