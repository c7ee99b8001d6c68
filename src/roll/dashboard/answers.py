"""What people ask of a run, each answered in a sentence with its figures and where to look: for `/answers`.

Every answer is read from the run's files, as all of the dashboard is: what they do not hold is said, not guessed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.dashboard.known import Known
from roll.dashboard.rollouts import KINDS

__all__ = ["answers"]

_FEW = 5
"""Steps at the beginning and the end that are compared."""
_MOVED = 0.05
"""Of a mean reward, beside its spread: less than this is flat."""
_MOST_STEPS = 60
_LEAST_RATE = 1e-9
"""Of a learning rate that moves anything."""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    id: str
    question: str
    text: str
    tone: str = ""
    figures: Sequence[tuple[str, float | str | None]] = ()
    links: Sequence[dict[str, Any]] = field(default_factory=list)


def _link(text: str, view: str, **params: Any) -> dict[str, Any]:
    return {"text": text, "view": view, "params": params}


def answers(known: Known) -> list[dict[str, Any]]:
    """All of them, in the order in which they are asked."""
    asked = (_flat, _filtered, _off_policy, _weights, _once, _stopped, _time, _pushed, _differs, _cost, _cheated)
    found = (ask(known) for ask in asked)
    return [
        {"id": a.id, "question": a.question, "answer": a.text, "tone": a.tone}
        | {"figures": [{"name": name, "value": value} for name, value in a.figures if value is not None]}
        | {"links": list(a.links)}
        for a in found
    ]


def _flat(known: Known) -> _Answer:
    rewards = known.train.columns.get("reward/mean")
    question = "Why is my reward flat?"
    links = [_link("its curve", "overview", runs=known.run, q="reward/mean")]
    if not rewards or len(rewards) < 2:
        return _Answer(id="flat", question=question, text="There are not two steps yet.", links=links)
    first, last = (known.mean("reward/mean", rows) for rows in (slice(_FEW), slice(-_FEW, None)))
    figures = [(f"reward, first {_FEW} steps", first), (f"last {_FEW} steps", last)]
    causes = list(_causes(known, last or 0.0))
    links += [link for _, link in causes if link]
    if first is not None and last is not None and last - first > _MOVED:
        text = f"It is not: it rose from {first:.3f} to {last:.3f}."
        return _Answer(id="flat", question=question, text=text, tone="good", figures=figures, links=links[:1])
    if not causes:
        text = "It is, and no metric says why: score known answers with `roll reward test`, raise the learning rate."
        return _Answer(id="flat", question=question, text=text, tone="warn", figures=figures, links=links)
    text = " ".join(text for text, _ in causes)
    return _Answer(id="flat", question=question, text=text, tone="bad", figures=figures, links=links)


def _causes(known: Known, reward: float) -> Iterable[tuple[str, dict[str, Any] | None]]:
    """Why nothing is learnt, the likeliest first."""
    recent = slice(-_FEW, None)
    cut = known.mean("rollout/unfinished_share", recent)
    if cut is not None and cut > 0.1:
        limit = known.number("rollout.max_new_tokens")
        yield (
            f"{cut:.0%} of answers are cut off at {limit or math.nan:g} tokens, and most rewards give such answers 0: "
            "raise rollout.max_new_tokens.",
            _link("answers that were cut off", "rollouts", finish_reason="length", kind="train"),
        )
    groups = known.mean("data/groups_trained", recent)
    if groups is not None and groups < 0.5:
        why = "too easy: all are right" if reward > 0.9 else "too hard, or the reward never fires"
        yield (
            f"In the last steps no group had rewards that differ, so nothing was learnt; the prompts are {why}.",
            _link("groups that were left out", "rollouts", trained="false", kind="train"),
        )
    stepped = known.mean("training/stepped", recent)
    if stepped is not None and stepped < 1:
        yield f"{1 - stepped:.0%} of optimiser steps had gradients that are not finite.", None
    rate = known.mean("training/learning_rate", recent)
    if rate is not None and rate < _LEAST_RATE:
        yield f"The learning rate is {rate:.1g}: nothing moves.", _link("it", "overview", runs=known.run, q="learning")
    apart = known.mean("agreement/logprob_mean_abs", recent)
    if apart is not None and apart > 0.1:
        yield f"Engine and trainer differ by {apart:.2f} nats a token: do they have the same weights?", None
    for name, bound, what in (
        ("training/policy/clip_fraction", 0.2, "of tokens are clipped: lower training.learning_rate"),
        ("training/policy/approximate_kl", 0.1, "nats a token are between two updates: lower training.learning_rate"),
    ):
        value = known.mean(name, recent)
        if value is not None and value > bound:
            yield f"{value:.2f} {what}.", _link(name, "overview", runs=known.run, q=name)


def _filtered(known: Known) -> _Answer:
    question = "Which answers were filtered, and why?"
    left_out = known.mean("data/groups_filtered")
    everything = _link("all of them", "rollouts", trained="false", kind="train")
    if left_out is None:
        text = "This run filters nothing: it has no groups."
        return _Answer(id="filtered", question=question, text=text)
    rollouts = known.rollouts
    mask = (rollouts.column("kind") == KINDS.index("train")) & np.isnan(rollouts.column("advantage"))
    numbers = Counter(rollouts.column("step")[mask].tolist())
    reasons = Counter(str(e.get("why") or "no reason given") for e in known.ledger if e.get("fate") == "filtered")
    total, trained = (known.train.last(f"ledger/{fate}") for fate in ("filtered", "trained"))
    text = f"{int(total or 0)} draws were filtered and {int(trained or 0)} trained."
    if reasons:
        reason, number = reasons.most_common(1)[0]
        text += f" Most often: {reason} ({number} draws)."
    steps = sorted(numbers, reverse=True)[:_MOST_STEPS]
    links = [everything] + [
        _link(f"step {step}: {numbers[step]} answers", "rollouts", trained="false", step_min=step, step_max=step)
        for step in steps
    ]
    return _Answer(id="filtered", question=question, text=text, figures=reasons.most_common(4), links=links)


def _off_policy(known: Known) -> _Answer:
    question = "Is it off-policy?"
    most, mean = known.most("rollout/staleness_max"), known.mean("rollout/staleness_mean")
    apart, share = known.mean("agreement/logprob_mean_abs"), known.mean("agreement/effective_sample_share")
    figures = [
        ("staleness, largest", most),
        ("staleness, mean", mean),
        ("async ratio", known.number("rollout.scheduling.async_ratio")),
        ("engine–trainer difference, nats a token", apart),
        ("effective share of the sample", share),
    ]
    links = [_link("engine against trainer", "overview", runs=known.run, q="agreement")]
    if most is None:
        text = "Nothing is generated, so the question does not arise."
        return _Answer(id="off_policy", question=question, text=text)
    if most == 0:
        text = "No: every answer was written by the policy that learnt from it."
        tone = "good"
    else:
        bound = math.ceil(known.number("rollout.scheduling.async_ratio") or 0)
        text = (
            f"By at most {most:.0f} update{'' if most == 1 else 's'}, {mean or 0:.2f} on average; the async ratio "
            f"allows {bound}. Each token is weighed by what its own policy said of it."
        )
        tone = "good" if most <= bound else "bad"
        links.insert(0, _link("stale answers", "rollouts", staleness_min=1, sort="staleness", desc=1))
    if apart is not None:
        text += f" Engine and trainer differ by {apart:.3f} nats a token" + (
            f", and {share:.1%} of the sample counts." if share is not None else "."
        )
        tone = "bad" if apart > 0.1 else tone
    return _Answer(id="off_policy", question=question, text=text, tone=tone, figures=figures, links=links)


def _weights(known: Known) -> _Answer:
    question = "Did my weights arrive?"
    syncs = [value for value in known.train.columns.get("sync/tensors", ()) if math.isfinite(value)]
    if not syncs:
        text = "No step brought weights to an engine."
        return _Answer(id="weights", question=question, text=text)
    dead = sum(value for value in known.train.columns.get("sync/engines_dead", ()) if math.isfinite(value))
    change, missed = known.mean("sync/probe_change"), known.mean("sync/probe_change_missed")
    engines = known.train.last("sync/engines") or 0
    text = (
        f"Yes: {len(syncs)} syncs, each of {syncs[-1]:.0f} tensors, whose checksums {engines:.0f} "
        f"{'engine' if engines == 1 else 'engines'} confirmed"
    )
    text += f"; {dead:.0f} engines died and were replaced." if dead else "."
    if change is not None:
        text += f" On the probe's text the trainer moved {change:.3f} nats a sync; it and the engine differ there by "
        text += f"{known.mean('sync/probe_mean_abs') or 0:.3f}."
    figures = [
        ("tensors", syncs[-1]),
        ("bytes", known.train.last("sync/bytes")),
        ("seconds of a sync", known.mean("time/sync_s")),
        ("probe: trainer moved, nats", change),
        ("probe: missed by the engine, nats", missed),
        ("probe: engine against trainer, nats", known.mean("sync/probe_mean_abs")),
    ]
    links = [_link("every sync", "health", show="Syncs"), _link("their curves", "overview", runs=known.run, q="sync/")]
    tone = "warn" if dead else "good"
    return _Answer(id="weights", question=question, text=text, tone=tone, figures=figures, links=links)


def _once(known: Known) -> _Answer:
    question = "Was my data used exactly once?"
    links = [_link("the ledger", "health", show="Ledger")]
    ids = [entry.get("draw_id") for entry in known.ledger]
    if not ids:
        text = "There is no checkpoint with a ledger yet; the metrics' counts are on Health."
        return _Answer(id="once", question=question, text=text, links=links)
    whole = ids == list(range(len(ids)))
    fates = Counter(str(entry.get("fate")) for entry in known.ledger)
    prompts = Counter(str(entry.get("uid")) for entry in known.ledger)
    most, least = max(prompts.values()), min(prompts.values())
    if not whole:
        text = "The ledger of the newest checkpoint has gaps or repeats: it is not one that ROLL wrote."
        return _Answer(id="once", question=question, text=text, tone="bad", links=links)
    times = f"{most} times" if most == least else f"{least} to {most} times"
    text = (
        f"Every draw was: {len(ids)} draws, numbered 0 to {len(ids) - 1} without a gap, each with one fate. "
        f"They are of {len(prompts)} prompts, each drawn {'once' if most == 1 else times}."
    )
    figures = [(fate, number) for fate, number in fates.most_common()]
    return _Answer(id="once", question=question, text=text, tone="good", figures=figures, links=links)


def _stopped(known: Known) -> _Answer:
    question = "Why did it stop?"
    step = known.train.steps[-1] if known.train.steps else 0
    links = [_link("log and alarms", "health", show="Alarms")]
    figures = [("last step", step), ("steps asked for", known.num_steps)]
    if known.status == "running":
        text = f"It has not: it is at step {step}."
        return _Answer(id="stopped", question=question, text=text, tone="good", figures=figures, links=links)
    if known.status == "finished":
        text = f"It was done: all {step} steps were made."
        return _Answer(id="stopped", question=question, text=text, tone="good", figures=figures, links=links)
    stops = known.settings.get("alarms.action") == "stop"
    newest = [alarm for alarm in known.alarms if alarm["step"] in (step, None)]
    if stops and newest:
        text = f"An alarm stopped it after step {step}: {newest[-1]['message']}."
        links += [_link("answers of that step", "rollouts", step_min=step, step_max=step, kind="train")]
    else:
        wrong = [line for line in known.log if " ERROR " in line or " CRITICAL " in line]
        said = wrong[-1] if wrong else (known.log[-1] if known.log else "")
        text = f"It ended after step {step} of {known.num_steps or 0:.0f}, without a word of its own"
        text += f"; the log's last: {said[:300]}" if said else ": it was killed, or its machine went away."
    text += " `roll resume` goes on from the newest checkpoint."
    return _Answer(id="stopped", question=question, text=text, tone="bad", figures=figures, links=links)


def _time(known: Known) -> _Answer:
    question = "Where does the time go?"
    links = [_link("lanes and phases", "time"), _link("curves of it", "overview", runs=known.run, q="time/")]
    total: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for step in known.steps:
        total.update({name: seconds or 0.0 for name, seconds in step["phases"].items()})
        held.update([step["held_back_by"]] if step["held_back_by"] else [])
    if not total:
        return _Answer(id="time", question=question, text="There is no trace of steps yet.", links=links)
    seconds = known.mean("time/step_s") or 0.0
    name, number = held.most_common(1)[0] if held else (total.most_common(1)[0][0], 0)
    text = (
        f"Mostly into {total.most_common(1)[0][0]}. A step takes {seconds:.1f} s; {number} of {len(known.steps)} were "
        f"held back by {_PHASES.get(name, name)}."
    )
    figures = [(f"{name}, s a step", round(spent / len(known.steps), 3)) for name, spent in total.most_common(5)]
    return _Answer(id="time", question=question, text=text, figures=figures, links=links)


_PHASES = {"wait": "waiting for rollouts", "generate": "generating"}


def _pushed(known: Known) -> _Answer:
    question = "Which tokens did the loss push?"
    rollouts = known.rollouts
    advantage = np.where(rollouts.column("kind") == KINDS.index("train"), rollouts.column("advantage"), np.nan)
    places = np.flatnonzero(np.isfinite(advantage))
    if not len(places):
        text = "No answer has an advantage: nothing was trained on, or the run learns from examples."
        if known.files_left:
            text = f"{known.files_left} files of answers are still to be read."
        return _Answer(id="pushed", question=question, text=text)
    newest = places[rollouts.column("step")[places] == rollouts.column("step")[places].max()]
    down, up = newest[advantage[newest].argmin()], newest[advantage[newest].argmax()]
    step = int(rollouts.column("step")[newest[0]])
    text = (
        f"In step {step}, the last that was trained, {len(newest)} answers: the advantages go from "
        f"{advantage[down]:.2f} to {advantage[up]:.2f}. A token's push is its advantage times its ratio, 0 where it is "
        "clipped."
    )
    links = [
        _link(name, "rollout", row=int(rollouts.column("row")[place]), tab="tokens", by="push")
        for name, place in (("tokens pushed down most", down), ("tokens pushed up most", up))
    ]
    links.append(_link("all that were trained", "rollouts", trained="true", sort="advantage", desc=0))
    return _Answer(id="pushed", question=question, text=text, links=links)


def _differs(known: Known) -> _Answer:
    question = "What differs between this run and another?"
    if not known.others:
        text = "There is no other run here: name several, as in `roll dashboard runs/a runs/b`."
        return _Answer(id="differs", question=question, text=text)
    nearest = min(known.others, key=lambda other: other[2])
    text = f"{nearest[1]} is nearest: {nearest[2]} keys differ, its name included."
    links = [
        _link(f"beside {name}: {number} keys", "overview", runs=f"{known.run},{other}", show="differences")
        for other, name, number in known.others
    ]
    return _Answer(id="differs", question=question, text=text, links=links)


def _cost(known: Known) -> _Answer:
    question = "What would it cost on N GPUs?"
    links = [_link("plans and configuration", "plan")]
    if not known.plans:
        text = (
            "Nothing was planned beside this run. `roll simulate --calibrate` fits the simulator to it, and "
            "`roll plan` with a device and a number of them says what a step takes; what it prints, kept as plan.txt "
            "in the run's directory, is shown here."
        )
        return _Answer(id="cost", question=question, text=text, tone="warn", links=links)
    names = ", ".join(str(plan["name"]) for plan in known.plans)
    lines = [line.strip() for plan in known.plans for line in str(plan.get("text") or "").splitlines()]
    said = next((line for line in lines if "s per step" in line or "step takes" in line), "")
    text = f"{said or 'It was planned or simulated'} ({names})."
    return _Answer(id="cost", question=question, text=text, tone="good", links=links)


def _cheated(known: Known) -> _Answer:
    question = "Is the reward being fooled?"
    names = {
        "hacking/length_reward_correlation": "length against reward",
        "hacking/repeated_text_share": "answers given to other prompts too",
        "hacking/self_repetition_share": "answers that repeat themselves",
        "hacking/shared_ngram_share": "phrases common to half of the prompts",
    }
    found = {label: known.mean(name, slice(-_FEW, None)) for name, label in names.items()}
    links = [
        _link("their curves", "overview", runs=known.run, q="hacking"),
        _link("answers", "rollouts", sort="reward", desc=1),
    ]
    if all(value is None for value in found.values()):
        text = "The run recorded none of the marks of that (hacking/…)."
        return _Answer(id="fooled", question=question, text=text)
    gone_off = [alarm for alarm in known.alarms if alarm["alarm"] in _FOOLED]
    shares = [value for label, value in found.items() if label != "length against reward" and value is not None]
    if gone_off:
        text, tone = f"It seems so: {gone_off[-1]['message']}", "bad"
    elif max(shares, default=0.0) > 0:
        text, tone = f"In the last {_FEW} steps, up to {max(shares):.0%} of answers repeat; read some.", "warn"
    else:
        text, tone = f"No mark of it in the last {_FEW} steps: answers repeat no others and not themselves.", "good"
    return _Answer(id="fooled", question=question, text=text, tone=tone, figures=list(found.items()), links=links)


_FOOLED = (
    "length_drift_above",
    "repeated_text_above",
    "shared_ngrams_above",
    "self_repetition_above",
    "disagreement_above",
)
