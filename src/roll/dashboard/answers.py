"""Common questions about a run, each answered in a sentence with its figures and links: for `/answers`.

Every answer is computed from the run's files, like the whole dashboard: missing data is reported, not guessed.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from roll.dashboard.answer import RECENT_STEPS, Answer, link
from roll.dashboard.ending import explain_end
from roll.dashboard.known import RunFacts
from roll.dashboard.learning import explain_learning
from roll.dashboard.rollouts import KINDS

__all__ = ["answers"]

_MOST_STEPS = 60


def answers(known: RunFacts) -> list[dict[str, Any]]:
    """Return the answers to all questions, in order."""
    asked = (
        explain_learning,
        _filtered,
        _off_policy,
        _weights,
        _once,
        explain_end,
        _time,
        _pushed,
        _differs,
        _cost,
        _cheated,
    )
    found = (ask(known) for ask in asked)
    return [
        {"id": a.id, "question": a.question, "answer": a.text, "tone": a.tone}
        | {"figures": [{"name": name, "value": value} for name, value in a.figures if value is not None]}
        | {"links": list(a.links)}
        for a in found
    ]


def _filtered(known: RunFacts) -> Answer:
    question = "Which answers were filtered, and why?"
    left_out = known.mean("data/groups_filtered")
    everything = link("all of them", "rollouts", trained="false", kind="train")
    if left_out is None:
        text = "This run filters nothing: it has no groups."
        return Answer(id="filtered", question=question, text=text)
    rollouts = known.rollouts
    mask = (rollouts.column("kind") == KINDS.index("train")) & np.isnan(rollouts.column("advantage"))
    numbers = Counter(rollouts.column("step")[mask].tolist())
    reasons = Counter(e.reason for e in known.ledger if e.fate == "filtered")
    total, trained = (known.train.last(f"ledger/{fate}") for fate in ("filtered", "trained"))
    text = f"{int(total or 0)} draws were filtered and {int(trained or 0)} trained."
    if reasons:
        reason, number = reasons.most_common(1)[0]
        text += f" Most often: {reason} ({number} draws)."
    steps = sorted(numbers, reverse=True)[:_MOST_STEPS]
    links = [everything] + [
        link(f"step {step}: {numbers[step]} answers", "rollouts", trained="false", step_min=step, step_max=step)
        for step in steps
    ]
    return Answer(id="filtered", question=question, text=text, figures=reasons.most_common(4), links=links)


def _off_policy(known: RunFacts) -> Answer:
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
    links = [link("engine against trainer", "overview", runs=known.run, q="agreement")]
    if most is None:
        text = "Nothing is generated, so the question does not arise."
        return Answer(id="off_policy", question=question, text=text)
    if most == 0:
        text = "No: every answer was written by the policy that was trained on it."
        tone = "good"
    else:
        bound = math.ceil(known.number("rollout.scheduling.async_ratio") or 0)
        text = (
            f"By at most {most:.0f} update{'' if most == 1 else 's'}, {mean or 0:.2f} on average; the async ratio "
            f"allows {bound}. Each token is weighted by the probability that its own policy reported for it."
        )
        tone = "good" if most <= bound else "bad"
        links.insert(0, link("stale answers", "rollouts", staleness_min=1, sort="staleness", desc=1))
    if apart is not None:
        text += f" Engine and trainer differ by {apart:.3f} nats a token" + (
            f", and {share:.1%} of the sample counts." if share is not None else "."
        )
        tone = "bad" if apart > 0.1 else tone
    return Answer(id="off_policy", question=question, text=text, tone=tone, figures=figures, links=links)


def _weights(known: RunFacts) -> Answer:
    question = "Did my weights arrive?"
    syncs = [value for value in known.train.columns.get("sync/tensors", ()) if math.isfinite(value)]
    if not syncs:
        text = "No step brought weights to an engine."
        return Answer(id="weights", question=question, text=text)
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
    links = [link("every sync", "health", show="Syncs"), link("their curves", "overview", runs=known.run, q="sync/")]
    tone = "warn" if dead else "good"
    return Answer(id="weights", question=question, text=text, tone=tone, figures=figures, links=links)


def _once(known: RunFacts) -> Answer:
    question = "Was my data used exactly once?"
    links = [link("the ledger", "health", show="Ledger")]
    ids = [entry.draw_id for entry in known.ledger]
    if not ids:
        text = "There is no checkpoint with a ledger yet; the metrics' counts are on Health."
        return Answer(id="once", question=question, text=text, links=links)
    whole = ids == list(range(len(ids)))
    fates = Counter(entry.fate for entry in known.ledger)
    prompts = Counter(str(entry.uid) for entry in known.ledger)
    most, least = max(prompts.values()), min(prompts.values())
    if not whole:
        text = "The ledger of the newest checkpoint has gaps or repeats: it is not one that ROLL wrote."
        return Answer(id="once", question=question, text=text, tone="bad", links=links)
    times = f"{most} times" if most == least else f"{least} to {most} times"
    text = (
        f"Every draw was: {len(ids)} draws, numbered 0 to {len(ids) - 1} without a gap, each with one fate. "
        f"They are of {len(prompts)} prompts, each drawn {'once' if most == 1 else times}."
    )
    figures = [(fate, number) for fate, number in fates.most_common()]
    return Answer(id="once", question=question, text=text, tone="good", figures=figures, links=links)


def _time(known: RunFacts) -> Answer:
    question = "Where does the time go?"
    links = [link("lanes and phases", "time"), link("curves of it", "overview", runs=known.run, q="time/")]
    total: Counter[str] = Counter()
    held: Counter[str] = Counter()
    steps = {step.step: step for step in known.steps}.values()  # an interrupted step was repeated
    for step in steps:
        total.update({name: seconds or 0.0 for name, seconds in step.phases.items()})
        held.update([step.held_back_by] if step.held_back_by else [])
    if not total:
        return Answer(id="time", question=question, text="There is no trace of steps yet.", links=links)
    # includes the checkpoint, like the phases; `time/step_s` does not
    seconds = sum(step.end_s - step.start_s for step in steps) / len(steps)
    name, number = held.most_common(1)[0] if held else (total.most_common(1)[0][0], 0)
    text = (
        f"Mostly into {total.most_common(1)[0][0]}. A step takes {seconds:.1f} s; {number} of {len(steps)} were "
        f"held back by {_PHASES.get(name, name)}."
    )
    figures = [(f"{name}, s a step", round(spent / len(steps), 3)) for name, spent in total.most_common(5)]
    return Answer(id="time", question=question, text=text, figures=figures, links=links)


_PHASES = {"wait": "waiting for rollouts", "generate": "generating"}


def _pushed(known: RunFacts) -> Answer:
    question = "Which tokens did the loss push?"
    rollouts = known.rollouts
    advantage = np.where(rollouts.column("kind") == KINDS.index("train"), rollouts.column("advantage"), np.nan)
    places = np.flatnonzero(np.isfinite(advantage))
    if not len(places):
        text = "No answer has an advantage: nothing was trained yet."
        if known.is_supervised:
            text = "This run learns from given examples: no token has an advantage."
        elif known.pipeline not in ("", "rlvr", "agentic"):
            text = f"The pipeline {known.pipeline} has no advantages: all tokens that it learns from count alike."
        if known.files_left:
            text = f"{known.files_left} files of answers are still to be read."
        return Answer(id="pushed", question=question, text=text)
    newest = places[rollouts.column("step")[places] == rollouts.column("step")[places].max()]
    down, up = newest[advantage[newest].argmin()], newest[advantage[newest].argmax()]
    step = int(rollouts.column("step")[newest[0]])
    last = f"the last one read so far ({known.files_left} files are left)" if known.files_left else "the last trained"
    text = (
        f"In step {step}, {last}, {len(newest)} answers: the advantages go from "
        f"{advantage[down]:.2f} to {advantage[up]:.2f}. A token's push is its advantage times its ratio, 0 where it is "
        "clipped."
    )
    links = [
        link(name, "rollout", row=int(rollouts.column("row")[place]), tab="tokens", by="push")
        for name, place in (("tokens pushed down most", down), ("tokens pushed up most", up))
    ]
    links.append(link("all that were trained", "rollouts", trained="true", sort="advantage", desc=0))
    return Answer(id="pushed", question=question, text=text, links=links)


def _differs(known: RunFacts) -> Answer:
    question = "What differs between this run and another?"
    if not known.others:
        text = "There is no other run here: name several, as in `roll dashboard runs/a runs/b`."
        return Answer(id="differs", question=question, text=text)
    nearest = min(known.others, key=lambda other: other[2])
    text = f"{nearest[1]} is nearest: {nearest[2]} keys differ, its name included."
    links = [
        link(f"compared with {name}: {number} keys", "overview", runs=f"{known.run},{other}", show="differences")
        for other, name, number in known.others
    ]
    return Answer(id="differs", question=question, text=text, links=links)


def _cost(known: RunFacts) -> Answer:
    question = "What would it cost on N GPUs?"
    links = [link("plans and configuration", "plan")]
    if not known.plans:
        text = (
            "This run has no plan. `roll plan` of its config.yaml, with --device and --devices, says what a step "
            "takes; what it prints, kept as plan.txt in the run's directory, is shown here. `roll simulate "
            "--calibrate` fits the simulator to this run."
        )
        return Answer(id="cost", question=question, text=text, tone="warn", links=links)
    names = ", ".join(str(plan["name"]) for plan in known.plans)
    lines = [line.strip() for plan in known.plans for line in str(plan.get("text") or "").splitlines()]
    said = next((line for line in lines if "s per step" in line or "step takes" in line), "")
    text = f"{said or 'It was planned or simulated'} ({names})."
    return Answer(id="cost", question=question, text=text, tone="good", links=links)


def _cheated(known: RunFacts) -> Answer:
    question = "Is the reward being fooled?"
    names = {
        "hacking/length_reward_correlation": "length against reward",
        "hacking/repeated_text_share": "answers given to other prompts too",
        "hacking/self_repetition_share": "answers that repeat themselves",
        "hacking/shared_ngram_share": "phrases common to half of the prompts",
    }
    found = {label: known.mean(name, slice(-RECENT_STEPS, None)) for name, label in names.items()}
    links = [
        link("their curves", "overview", runs=known.run, q="hacking"),
        link("answers", "rollouts", sort="reward", desc=1),
    ]
    if all(value is None for value in found.values()):
        text = "The run recorded no reward hacking signals (hacking/…)."
        if known.is_supervised:
            text = "This run learns from given examples: it has no reward."
        return Answer(id="fooled", question=question, text=text)
    gone_off = [alarm for alarm in known.alarms if alarm.alarm in _FOOLED]
    shares = [value for label, value in found.items() if label != "length against reward" and value is not None]
    if gone_off:
        text, tone = f"It seems so: {gone_off[-1].message}", "bad"
    elif max(shares, default=0.0) > 0:
        text, tone = f"In the last {RECENT_STEPS} steps, up to {max(shares):.0%} of answers repeat; read some.", "warn"
    else:
        text, tone = (
            f"No mark of it in the last {RECENT_STEPS} steps: answers repeat no others and not themselves.",
            "good",
        )
    return Answer(id="fooled", question=question, text=text, tone=tone, figures=list(found.items()), links=links)


_FOOLED = (
    "length_drift_above",
    "repeated_text_above",
    "shared_ngrams_above",
    "self_repetition_above",
    "disagreement_above",
)
