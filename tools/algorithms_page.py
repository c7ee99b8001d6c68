"""`docs/algorithms.md`, written from the presets themselves:  python tools/algorithms_page.py docs/algorithms.md"""

from __future__ import annotations

import sys
from pathlib import Path

from roll.config.algorithm import AlgorithmConfig
from roll.config.presets import PRESET_NAMES, describe_preset, preset, preset_note, settings

__all__ = ["page"]

_HEAD = """\
# Algorithms

*Written from the presets in `src/roll/config/presets/`: change them there.*

An algorithm in ROLL is a combination of independent parts. `algorithm.type` names a preset, which sets some of their
keys. A preset is only a starting point: every key in your file overrides the preset's.

```yaml
algorithm: {type: dapo, gate: {high: 0.3}, kl: {coefficient: 0.001}}
```

| part | key | what it sets |
|---|---|---|
| reward | `algorithm.reward` | scaling, shifting and clipping of rewards; penalties for long or malformed answers |
| advantage | `algorithm.advantage` | baseline, deviation to divide by, returns over tokens or turns, whitening |
| filters | `algorithm.filters` | which groups and rollouts are trained; whether new prompts replace others |
| ratio | `algorithm.ratio` | whether probability ratios are taken per token, per chunk, or per answer |
| gate | `algorithm.gate` | how ratio and advantage become an objective: which clip, if any |
| aggregation | `algorithm.aggregation` | how the losses of tokens become one number |
| correction | `algorithm.correction` | importance-sampling correction if engine and trainer probabilities differ |
| KL, entropy | `algorithm.kl`, `algorithm.entropy` | penalty for distance from the reference; bonus for entropy |
| updates | `algorithm.updates` | mini-batches and passes over each batch |
| critic | `algorithm.critic` | the value models behind `advantage.estimator: gae` |
| credit | `algorithm.credit` | whether attention weights the advantages |
| imitation | `algorithm.imitation` | demonstrations in addition to the policy's own rollouts |

`roll config explain algorithm` lists every key and what each preset sets; so does [Configuration](configuration.md).

These conventions hold in every formula below:

- R is the reward after shaping by `algorithm.reward`. Filters use the same reward, unless `filters.metric` is
  `accuracy`.
- With `kl.place: reward`, R is the penalized reward, R - beta sum_t KL_t over an answer's tokens, before baseline and
  deviation; filters do not see the penalty. If turns or tokens have their own returns (`rebn`; `reinforce_pp`,
  `remax`, `ppo`, `asy_ppo`), each reward is penalized by its own KL. A rollout that is not trained enters
  baselines with the mean penalty per token of the trained ones.
- An answer's limit is `rollout.max_new_tokens` for each turn that its prompt has.
- Log-ratios are clamped to ± 20 before they are exponentiated.
- Sums cover only the tokens that the policy generated.
- Counts cover all samples of one update, so the gradient does not depend on micro-batches, packing, order, or ranks.
  Filtered rollouts enter baselines but not these counts. Rollouts with an infrastructure error enter neither.
- `old` is the trainer's policy before the update; `mu` (in keys: `rollout`) is the engine's policy, which sampled.
- The correction for the difference between the two is on by default (`correction`: per token, truncated at 2), unless
  the ratio itself is taken against the engine. The difference is always logged, as `training/mismatch/…` and
  `agreement/…`. It contains mismatch and staleness; see [below](#mismatch-and-staleness). With `rollout.top_p` or
  `top_k`, an engine's probabilities are normalized over the tokens that it kept, so old / mu is below 1 at every
  token: products over an answer are refused, and `roll check` reports the other consequences.

See also [how the algorithms learn](benchmarks/algorithms.md) on the quickstart task, and
[how methods with turns learn](benchmarks/multi_turn.md) over two turns.

## Which algorithm to choose
"""

_OWN = """\
## Demonstrations

With any preset, though most usefully with `ipa`, prompts can carry the answer of an expert:

```yaml
data: [{source: file, path: sums.jsonl, reward: math, expert_key: solution}]
algorithm: {type: ipa, imitation: {weight: 1.0, when: unsolved}}
```

A demonstration becomes a rollout in the model's own tokens. It is played in the environment, if there is one, and
scored by the same rewards. The objective for its tokens is weight x G log pi, where G is its own return, discounted per
turn if the estimator works on turns. A demonstration enters no baseline, no filter and no critic
loss. KL penalties that are estimated from samples exclude it, because the policy did not sample it. A demonstration
with a reward of 0 is not used. `when: unsolved` uses it only if no rollout of the policy got the same reward.
`data/demonstrations` counts them.

## Mismatch and staleness

A sampled token has a log-prob under three policies: `rollout`, the engine that sampled it; `behavior`, the trainer
under the same policy version; and `old`, the trainer before this update. In an asynchronous run, a rollout that
continued across weight syncs has tokens of several versions, and

    log(old / rollout) = log(behavior / rollout) + log(old / behavior)
         both          =        mismatch         +      staleness

Mismatch is the numerical difference of engine and trainer with the same weights (kernels, dtypes, 8-bit weights,
`top_p`, and keys and values that an engine cached under older weights). Staleness is the change of the policy since
then. The ratio old / rollout corrects both at once, so one threshold serves two purposes (arXiv 2605.12070,
"missing old logits"). What each setting corrects:

| setting | corrects | needs snapshots |
|---|---|---|
| `correction.corrects: both` (default); any `level`, `upper`, mask and `veto` | both | no |
| `correction.corrects: mismatch` | mismatch | yes |
| `correction.corrects: staleness` | staleness | yes |
| `ratio.against: old` (default) | neither: the ratio contains only the updates of this step | no |
| `ratio.against: behavior` | staleness, inside the clip | yes |
| `ratio.against: rollout` | both, inside the clip or the gate's bounds | no |

In the presets:

{presets}

The exact decoupled objective clips staleness and update together and corrects mismatch separately:

```yaml
algorithm: {type: grpo, ratio: {against: behavior}, correction: {corrects: mismatch}}
rollout: {scheduling: {async_ratio: 2}}
```

The trainer then copies its trained weights to host memory before each update, keeps the last ⌈`async_ratio`⌉ versions
(with LoRA, only their adapters), and scores each stale token with the version that sampled it. This costs
⌈`async_ratio`⌉ copies of the weights, and one forward pass over its rollouts for each older version in a batch.
`correction.snapshots: true` does the same only for the metrics. `train_inference/mismatch/…` and
`train_inference/staleness/…` measure the two separately; without snapshots, mismatch is measured only on the tokens
of the current version, and staleness is not measured. A synchronous run has no stale tokens, so mismatch is both. The
back-end must be `torch`. A resumed run starts its unfinished rollouts again, so it needs no older version; a replay
begins without snapshots, and `train_inference/known_share` is the share of tokens with one.

## A shared critic

`critic: {shared: true}` puts a value head on the policy's own network instead of loading a second model: one forward
and one backward pass serve `loss + critic.coefficient x value loss`. The head starts at 0 and has its own learning
rate (`critic.head_learning_rate`). Checkpoints contain it; engines and exported models do not. It costs one forward
pass for the values before each update, and hardly any memory.

```
roll train examples/quickstart.yaml algorithm.type=ppo algorithm.critic.shared=true
```

Measured on the quickstart task (40 steps, at most 16 tokens, seed 0; the error is the root mean square of value minus
return over the last 10 steps):

| critic | `coefficient` | rate of head or critic | steps to reward 0.8 | held-out after | gradient norm | error |
|---|---|---|---|---|---|---|
| shared | 0.01 | 1e-4 | 21 | 0.969 | 3.1 | 0.23 |
| shared, default | 0.1 | 1e-4 | 22 | 0.958 | 3.0 | 0.21 |
| shared | 0.1 | 1e-3 | 23 | 0.958 | 3.5 | 0.29 |
| shared | 1 | 1e-4 | 22 | 0.969 | 6.3 | 0.28 |
| its own, default | | 1e-5 | 21 | 0.969 | 3.6 | 0.71 |
| its own | | 1e-4 | 22 | 0.948 | 3.6 | 0.27 |

Here, the learning speed of the policy does not depend on the critic, and a shared critic's values are no worse. A
coefficient of 1 doubles the gradient norm; because `training.max_grad_norm` limits the gradient of both losses
together, the policy's share decreases. A separate critic at 1e-5, the usual rate for large models and long runs, lags
far behind in so few steps: its mean value is 0.28, and the mean return 0.96. Whitening hides a lag that all tokens
share if `advantage.gae_lambda` is 1. In short runs, and with a smaller lambda, raise `critic.learning_rate` or
`critic.num_epochs`, and compare `critic/value/mean` with `critic/value/return`.

## Your own

To use your own loss or advantage, name the function by its import path or its file.

`algorithm.advantage.function` names a function `def advantages(episodes: list[Episode]) -> list`, which returns one
number or one array [T] for each episode; see `roll.algorithms.episodes.Episode`. Reward shaping, filters, ratio, gate
and KL stay as configured.

`algorithm.loss` names a function `def loss(inputs: LossInputs) -> LossOutputs`, which receives the loss tokens of one
micro-batch; see `roll.types.LossInputs`. Divide by the counts of the whole batch that it receives (`num_tokens`,
`num_sequences`), never by those of the micro-batch. Then the result does not depend on how the batch is split. If it
needs more than log-probs from the trainer, it declares this in an attribute: `loss.needs = Needs(entropy=True)`, of
`roll.types`.

`algorithm.gate: {type: python, gate: "my_gate.py:Cubic", options: {strength: 0.5}}` names a class whose instances
replace the gate, `(log_ratio, logprobs, advantages) -> objective`, each [N]; ratio, KL, entropy, correction and
aggregation stay as configured. `Gate` in `roll.algorithms.gates` describes its optional members.

An installed package can register a loss or a gate by name, with entry points of the groups `roll.losses` and
`roll.gates`.

`examples/algorithms/` has an advantage and a loss, and this runs them:

```
roll train examples/own_algorithm.yaml
```
"""


def page() -> str:
    """The whole page."""
    lines = [_HEAD, "| preset | when | cost | stability |", "|---|---|---|---|"]
    for name in PRESET_NAMES:
        note = preset_note(name)
        lines.append(f"| [`{name}`](#{name}) | {note.when} | {note.cost} | {note.stability} |")
    for name in PRESET_NAMES:
        title, formula, text = describe_preset(name).split("\n\n", 2)
        body = text.strip().replace("\n", " ")
        keys = ", ".join(f"`{text}`" for text in settings(preset(name))) or "nothing: it is the default"
        formula = "\n".join(line.removeprefix("    ") for line in formula.splitlines())
        lines += ["", f"## {name}", "", title, "", "```", formula, "```", "", body, "", f"Sets: {keys}."]
    return "\n".join([*lines, "", _OWN.replace("{presets}", _corrections())])


def _corrections() -> str:
    """Return a table of what each preset's ratio holds and its correction corrects."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in PRESET_NAMES:
        algorithm = AlgorithmConfig.model_validate({"type": name})
        rows.setdefault((_ratio_holds(algorithm), _corrected(algorithm)), []).append(f"`{name}`")
    table = [f"| {', '.join(names)} | {ratio} | {corrected} |" for (ratio, corrected), names in rows.items()]
    return "\n".join(["| preset | the ratio holds | the correction |", "|---|---|---|", *table])


def _ratio_holds(algorithm: AlgorithmConfig) -> str:
    if algorithm.gate.type == "log_prob":
        return "nothing: there is none"
    return {"old": "the updates of the step", "behavior": "staleness too", "rollout": "staleness and mismatch too"}[
        algorithm.ratio.against
    ]


def _corrected(algorithm: AlgorithmConfig) -> str:
    correction = algorithm.correction
    acts = {
        "truncated at": correction.upper,
        "left out below": correction.mask_low,
        "left out above": correction.mask_high,
        "vetoed below": correction.veto,
    }
    said = ", ".join(f"{what} {bound:g}" for what, bound in acts.items() if bound is not None)
    return f"{correction.corrects} ({correction.level}, {said})" if said else "none"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
