"""`docs/algorithms.md`, written from the presets themselves:  python -m roll.config.presets.page docs/algorithms.md"""

from __future__ import annotations

import sys
from pathlib import Path

from roll.config.presets import PRESET_NAMES, describe_preset, preset, preset_note, settings

__all__ = ["page"]

_HEAD = """\
# Algorithms

*Written from the presets in `src/roll/config/presets/`: change them there.*

An algorithm is a choice of independent parts. `algorithm.type` names a preset, which is only a starting point: whatever
else the file says wins, key by key.

```yaml
algorithm: {type: dapo, gate: {high: 0.3}, kl: {coefficient: 0.001}}
```

| part | key | what it decides |
|---|---|---|
| reward | `algorithm.reward` | scale, shift, clip, overlong and format penalties |
| advantage | `algorithm.advantage` | baseline, deviation, returns over tokens or turns, whitening |
| filters | `algorithm.filters` | which groups and rollouts are trained, refills |
| ratio | `algorithm.ratio` | of tokens, chunks, or whole answers |
| gate | `algorithm.gate` | how ratio and advantage become an objective |
| aggregation | `algorithm.aggregation` | from tokens to one number |
| correction | `algorithm.correction` | engine's probabilities against the trainer's |
| KL, entropy | `algorithm.kl`, `algorithm.entropy` | distance to the reference, bonus |
| updates | `algorithm.updates` | mini-batches and passes over a batch |
| critic | `algorithm.critic` | value models of `advantage.estimator: gae` |
| credit | `algorithm.credit` | advantages weighted by attention |
| imitation | `algorithm.imitation` | demonstrations beside the policy's own rollouts |

`roll config explain algorithm` shows every key and what each preset sets; so does [Configuration](configuration.md).

Conventions, in every formula: log-ratios are clamped to ± 20 before they are exponentiated; sums run over the tokens
that the policy wrote, whatever lies between; counts are those of all that one update trains, so the gradient does not
depend on micro-batches, packing, order, or ranks; what a filter left out is in baselines and not in these counts, and a
rollout that infrastructure failed is in neither. `old` is the trainer's policy before the update, `mu` (in keys:
`rollout`) the engine's, which sampled. The correction for their difference is on by default (`correction`: token level,
truncated at 2) unless the ratio itself is against the engine, and its figures are logged always:
`training/mismatch/…`, `agreement/…`.

How they learn on the quickstart task: [How the algorithms learn](benchmarks/algorithms.md); over two turns:
[How methods with turns learn](benchmarks/multi_turn.md).

## Which one
"""

_OWN = """\
## Demonstrations

With any preset, and above all with `ipa`, prompts may bring what an expert answered:

```yaml
data: [{source: file, path: sums.jsonl, reward: math, expert_key: solution}]
algorithm: {type: ipa, imitation: {weight: 1.0, when: unsolved}}
```

A demonstration becomes a rollout in the model's own tokens, is played in the environment where there is one, and is
scored by the same rewards. Its tokens have the objective weight x G log pi, where G is its own return, discounted per
turn where the estimator has turns. It is in no group's baseline, passes no filter and teaches no critic, and KL
penalties that are estimated from samples leave it out, since the policy did not sample it. One that earns nothing is
left out.
`when: unsolved` shows it only where no rollout of the policy got as much. `data/demonstrations` counts them.

## A shared critic

`critic: {shared: true}` puts a value head on the policy's own network in place of a second model: one forward and one
backward pass for `loss + critic.coefficient x value loss`. The head begins at 0 and has its own learning rate
(`critic.head_learning_rate`), engines and exported models do not have it, and checkpoints do. It costs a pass for the
values before the update, and no memory to speak of.

```
roll train examples/quickstart.yaml algorithm.type=ppo algorithm.critic.shared=true
```

## Your own

A loss or an advantage of yours needs no change to the package: name the function by import path or by file.

`algorithm.advantage.function`: `def advantages(episodes: list[Episode]) -> list`, one number or one array [T] for every
episode; see `roll.algorithms.episodes.Episode`. Reward shaping, filters, ratio, gate and KL stay as configured.

`algorithm.loss`: `def loss(inputs: LossInputs) -> LossOutputs` sees the loss tokens of one micro-batch; see
`roll.algorithms.inputs`. Divide by the counts of the whole batch that it is given (`num_tokens`, `num_sequences`),
never by the micro-batch's own: then the result does not depend on how the batch is cut.

`examples/algorithms/` has both, with a configuration that uses them:

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
    return "\n".join([*lines, "", _OWN])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
