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
keys. It is only a starting point: any key that your file sets wins over the preset's.

```yaml
algorithm: {type: dapo, gate: {high: 0.3}, kl: {coefficient: 0.001}}
```

| part | key | what it decides |
|---|---|---|
| reward | `algorithm.reward` | scaling, shifting and clipping of rewards; penalties for long or malformed answers |
| advantage | `algorithm.advantage` | baseline, deviation to divide by, returns over tokens or turns, whitening |
| filters | `algorithm.filters` | which groups and rollouts are trained; whether new prompts replace others |
| ratio | `algorithm.ratio` | whether probability ratios are taken per token, per chunk, or per answer |
| gate | `algorithm.gate` | how ratio and advantage become an objective: which clip, if any |
| aggregation | `algorithm.aggregation` | how the losses of tokens become one number |
| correction | `algorithm.correction` | what is done where engine's and trainer's probabilities differ |
| KL, entropy | `algorithm.kl`, `algorithm.entropy` | penalty for distance from the reference; bonus for entropy |
| updates | `algorithm.updates` | mini-batches and passes over each batch |
| critic | `algorithm.critic` | the value models behind `advantage.estimator: gae` |
| credit | `algorithm.credit` | whether attention weights the advantages |
| imitation | `algorithm.imitation` | demonstrations beside the policy's own rollouts |

`roll config explain algorithm` lists every key and what each preset sets; so does [Configuration](configuration.md).

These conventions hold in every formula below:

- R is the reward that is trained: shaped by `algorithm.reward`. Filters look at the same, unless `filters.metric` is
  `accuracy`.
- With `kl.place: reward`, R is the penalised reward, R - beta sum_t KL_t over an answer's tokens, before baseline and
  deviation; filters do not see the penalty. Where turns or tokens have returns of their own (`rebn`; `reinforce_pp`,
  `remax`, `ppo`, `asy_ppo`), each one's reward is penalised by its own. A rollout that is not trained counts in
  baselines with the mean penalty per token of those that are.
- An answer's limit is `rollout.max_new_tokens` for each turn that its prompt has.
- Log-ratios are clamped to ± 20 where they are exponentiated.
- Sums run over the tokens that the policy wrote, and skip whatever lies between them.
- Counts are those of everything that one update trains, so the gradient does not depend on micro-batches, packing,
  order, or ranks. What a filter left out is in baselines but not in these counts. A rollout that the infrastructure
  failed is in neither.
- `old` is the trainer's policy before the update; `mu` (in keys: `rollout`) is the engine's, which sampled.
- The correction for the difference between the two is on by default (`correction`: per token, truncated at 2), unless
  the ratio itself is taken against the engine. The difference is always logged, as `training/mismatch/…` and
  `agreement/…`. It holds mismatch and staleness; see [below](#mismatch-and-staleness). With `rollout.top_p` or
  `top_k`, an engine's probabilities are of the tokens that it kept, so old / mu is their share, below 1, at every
  token: products over an answer are refused, and `roll check` says what else changes.

See also [how the algorithms learn](benchmarks/algorithms.md) on the quickstart task, and
[how methods with turns learn](benchmarks/multi_turn.md) over two turns.

## Which one
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
turn if the estimator works on turns. A demonstration is in no group's baseline, passes through no filter, and teaches
no critic. KL penalties estimated from samples leave it out, because the policy did not sample it. A demonstration that
earns nothing is left out altogether. `when: unsolved` uses it only if no rollout of the policy earned as much.
`data/demonstrations` counts them.

## Mismatch and staleness

Three policies know the log-prob of a sampled token: `rollout`, the engine that sampled it; `behavior`, the trainer
under the same policy version; and `old`, the trainer before this update. In an asynchronous run a rollout that weight
syncs interrupted has tokens of several versions, and

    log(old / rollout) = log(behavior / rollout) + log(old / behavior)
         both          =        mismatch         +      staleness

Mismatch is what engine and trainer compute differently from the same weights (kernels, dtypes, 8-bit weights,
`top_p`, and keys and values that an engine kept from older weights). Staleness is what the policy has learned since.
A factor of old / rollout corrects both at once, so that one threshold must serve two purposes (arXiv 2605.12070,
"missing old logits"). What each setting corrects:

| setting | corrects | needs snapshots |
|---|---|---|
| `correction.corrects: both` (default); every `level`, `upper`, mask and `veto` alike | both | no |
| `correction.corrects: mismatch`, likewise | mismatch | yes |
| `correction.corrects: staleness`, likewise | staleness | yes |
| `ratio.against: old` (default) | neither: the ratio holds the updates of this step alone | no |
| `ratio.against: behavior` | staleness, inside the clip | yes |
| `ratio.against: rollout` | both, inside the clip or the gate's bounds | no |

In the presets:

{presets}

The exact decoupled objective clips staleness and update together and corrects mismatch on its own:

```yaml
algorithm: {type: grpo, ratio: {against: behavior}, correction: {corrects: mismatch}}
rollout: {scheduling: {async_ratio: 2}}
```

The trainer then copies its trained weights to main memory before each update, keeps the last ⌈`async_ratio`⌉ versions
(with LoRA, their adapters alone), and scores each stale token with the version that sampled it. This costs
⌈`async_ratio`⌉ copies of the weights, and one forward pass over its rollouts for each older version in a batch.
`correction.snapshots: true` does the same for the metrics alone. `train_inference/mismatch/…` and
`train_inference/staleness/…` measure the two apart; without snapshots, mismatch is measured on the tokens of the
current version alone, and staleness not at all. A synchronous run has no stale tokens, so mismatch is both. The
back-end must be `torch`. A resumed run starts its unfinished rollouts again, so it needs no older version; a replay
begins without snapshots, and `train_inference/known_share` says how many tokens have none.

## A shared critic

`critic: {shared: true}` puts a value head on the policy's own network instead of loading a second model: one forward
and one backward pass serve `loss + critic.coefficient x value loss`. The head starts at 0 and has a learning rate of
its own (`critic.head_learning_rate`). Checkpoints contain it; engines and exported models do not. It costs one forward
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

How fast the policy learns depends on none of them here, and a shared critic's values are no worse. A coefficient of 1
doubles the policy's gradient norm; since `training.max_grad_norm` bounds the gradient of both losses together, less of
it is the policy's. A critic of its own at 1e-5, which is usual for large models and long runs, lags far behind in so
few steps: its mean value is 0.28 where the return is 0.96. Whitening hides a lag that all tokens share as long as
`advantage.gae_lambda` is 1. In short runs, and with a smaller lambda, raise `critic.learning_rate` or
`critic.num_epochs`, and watch `critic/value/mean` beside `critic/value/return`.

## Your own

You can use a loss or an advantage of your own without changing the package: name the function, by import path or by
file.

`algorithm.advantage.function` names a `def advantages(episodes: list[Episode]) -> list`, which returns one number or
one array [T] for each episode; see `roll.algorithms.episodes.Episode`. Reward shaping, filters, ratio, gate and KL stay
as configured.

`algorithm.loss` names a `def loss(inputs: LossInputs) -> LossOutputs`, which sees the loss tokens of one micro-batch;
see `roll.types.LossInputs`. Divide by the counts of the whole batch that it receives (`num_tokens`, `num_sequences`),
never by those of the micro-batch. Then the result does not depend on how the batch is split. What it needs of the
trainer beside log-probs it says in an attribute: `loss.needs = Needs(entropy=True)`, of `roll.types`.

`algorithm.gate: {type: python, gate: "my_gate.py:Cubic", options: {strength: 0.5}}` names a class whose instances take
the place of a gate, `(log_ratio, logprobs, advantages) -> objective`, each [N]; ratio, KL, entropy, correction and
aggregation stay. See `Gate` in `roll.algorithms.gates` for what else it may say.

A package that is installed can give a loss or a gate a name, by entry points of the groups `roll.losses` and
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
