"""Answers to common questions about a run, for `/answers`: each is a sentence with figures and links.

Answers are computed from the run's files; if data is missing, the answer says so.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from roll.dashboard.answer import RECENT_STEPS, Answer, build_link
from roll.dashboard.learning import explain_learning
from roll.dashboard.rollouts import KINDS
from roll.dashboard.run_end import explain_end
from roll.dashboard.run_facts import RunFacts

__all__ = ["answer_questions"]

_MAX_STEPS = 60


def answer_questions(facts: RunFacts) -> list[dict[str, Any]]:
    """Answer all questions about a run, in the order of the page."""
    explanations = (
        explain_learning,
        _explain_filtering,
        _explain_staleness,
        _explain_weight_syncs,
        _explain_draws,
        explain_end,
        _explain_time,
        _explain_token_updates,
        _compare_configurations,
        _estimate_cost,
        _explain_reward_hacking,
    )
    found = (ask(facts) for ask in explanations)
    return [
        {"id": a.id, "question": a.question, "answer": a.text, "tone": a.tone}
        | {"figures": [{"name": name, "value": value} for name, value in a.figures if value is not None]}
        | {"links": list(a.links)}
        for a in found
    ]


def _explain_filtering(facts: RunFacts) -> Answer:
    question = "Which answers were filtered, and why?"
    left_out = facts.compute_mean("data/groups_filtered")
    everything = build_link("all of them", "rollouts", trained="false", kind="train")
    if left_out is None:
        text = "This run has no groups, so nothing is filtered."
        return Answer(id="filtered", question=question, text=text)
    rollouts = facts.rollouts
    mask = (rollouts.get_column("kind") == KINDS.index("train")) & np.isnan(rollouts.get_column("advantage"))
    numbers = Counter(rollouts.get_column("step")[mask].tolist())
    reasons = Counter(e.reason for e in facts.ledger if e.outcome == "filtered")
    total, trained = (facts.train.get_last(f"ledger/{outcome}") for outcome in ("filtered", "trained"))
    text = f"{int(total or 0)} draws were filtered and {int(trained or 0)} trained."
    if reasons:
        reason, number = reasons.most_common(1)[0]
        text += f" Most frequent reason: {reason} ({number} draws)."
    steps = sorted(numbers, reverse=True)[:_MAX_STEPS]
    links = [everything] + [
        build_link(f"step {step}: {numbers[step]} answers", "rollouts", trained="false", step_min=step, step_max=step)
        for step in steps
    ]
    return Answer(id="filtered", question=question, text=text, figures=reasons.most_common(4), links=links)


def _explain_staleness(facts: RunFacts) -> Answer:
    question = "Is it off-policy?"
    most, mean = facts.find_maximum("rollout/staleness_max"), facts.compute_mean("rollout/staleness_mean")
    apart, share = (
        facts.compute_mean("agreement/logprob_mean_abs"),
        facts.compute_mean("agreement/effective_sample_share"),
    )
    figures = [
        ("staleness, largest", most),
        ("staleness, mean", mean),
        ("async ratio", facts.get_number("rollout.scheduling.async_ratio")),
        ("engine–trainer difference, nats per token", apart),
        ("effective sample fraction", share),
    ]
    links = [build_link("engine against trainer", "overview", runs=facts.run, q="agreement")]
    if most is None:
        text = "This run generates nothing, so no sample is off-policy."
        return Answer(id="off_policy", question=question, text=text)
    if most == 0:
        text = "No: every answer was sampled by the policy version that was trained on it."
        tone = "good"
    else:
        bound = math.ceil(facts.get_number("rollout.scheduling.async_ratio") or 0)
        text = (
            f"Yes, by at most {most:.0f} update{'' if most == 1 else 's'}, {mean or 0:.2f} on average; the async ratio "
            f"allows {bound}. The correction weights each token by the ratio to the policy that sampled it."
        )
        tone = "good" if most <= bound else "bad"
        links.insert(0, build_link("stale answers", "rollouts", staleness_min=1, sort="staleness", desc=1))
    if apart is not None:
        text += f" The log-probs of engine and trainer differ by {apart:.3f} nats per token" + (
            f", and the effective sample fraction is {share:.1%}." if share is not None else "."
        )
        tone = "bad" if apart > 0.1 else tone
    return Answer(id="off_policy", question=question, text=text, tone=tone, figures=figures, links=links)


def _explain_weight_syncs(facts: RunFacts) -> Answer:
    question = "Did my weights arrive?"
    syncs = [value for value in facts.train.columns.get("sync/tensors", ()) if math.isfinite(value)]
    if not syncs:
        text = "No step has synced weights to an engine."
        return Answer(id="weights", question=question, text=text)
    dead = sum(value for value in facts.train.columns.get("sync/engines_dead", ()) if math.isfinite(value))
    change, missed = facts.compute_mean("sync/probe_change"), facts.compute_mean("sync/probe_change_missed")
    engines = facts.train.get_last("sync/engines") or 0
    text = (
        f"Yes: {engines:.0f} {'engine' if engines == 1 else 'engines'} confirmed the checksums of all {syncs[-1]:.0f} "
        f"tensors in {len(syncs)} syncs"
    )
    text += f"; {dead:.0f} engines died and were replaced." if dead else "."
    if change is not None:
        text += f" On the probe's text, the trainer's log-probs change by {change:.3f} nats per sync, and differ from "
        text += f"the engine's by {facts.compute_mean('sync/probe_mean_abs') or 0:.3f} nats."
    figures = [
        ("tensors", syncs[-1]),
        ("bytes", facts.train.get_last("sync/bytes")),
        ("seconds per sync", facts.compute_mean("time/sync_s")),
        ("probe: change of the trainer, nats", change),
        ("probe: change that the engine does not show, nats", missed),
        ("probe: engine–trainer difference, nats", facts.compute_mean("sync/probe_mean_abs")),
    ]
    links = [
        build_link("every sync", "health", show="Syncs"),
        build_link("their curves", "overview", runs=facts.run, q="sync/"),
    ]
    tone = "warn" if dead else "good"
    return Answer(id="weights", question=question, text=text, tone=tone, figures=figures, links=links)


def _explain_draws(facts: RunFacts) -> Answer:
    question = "Was my data used exactly once?"
    links = [build_link("the ledger", "health", show="Ledger")]
    ids = [entry.draw_id for entry in facts.ledger]
    if not ids:
        text = "There is no checkpoint with a ledger yet; Health shows the counts from the metrics."
        return Answer(id="once", question=question, text=text, links=links)
    whole = ids == list(range(len(ids)))
    outcomes = Counter(entry.outcome for entry in facts.ledger)
    prompts = Counter(str(entry.uid) for entry in facts.ledger)
    most, least = max(prompts.values()), min(prompts.values())
    if not whole:
        text = "No: the ledger of the newest checkpoint has gaps or repeated draws, so ROLL did not write it."
        return Answer(id="once", question=question, text=text, tone="bad", links=links)
    times = f"{most} times" if most == least else f"{least} to {most} times"
    text = (
        f"Yes: {len(ids)} draws, numbered 0 to {len(ids) - 1} without a gap, have one outcome each. "
        f"They are draws of {len(prompts)} prompts; each prompt was drawn {'once' if most == 1 else times}."
    )
    figures = [(outcome, number) for outcome, number in outcomes.most_common()]
    return Answer(id="once", question=question, text=text, tone="good", figures=figures, links=links)


def _explain_time(facts: RunFacts) -> Answer:
    question = "Where does the time go?"
    links = [build_link("lanes and phases", "time"), build_link("time curves", "overview", runs=facts.run, q="time/")]
    total: Counter[str] = Counter()
    held: Counter[str] = Counter()
    steps = {step.step: step for step in facts.steps}.values()  # an interrupted step was repeated
    for step in steps:
        total.update({name: seconds or 0.0 for name, seconds in step.phases.items()})
        held.update([step.held_back_by] if step.held_back_by else [])
    if not total:
        return Answer(id="time", question=question, text="There is no trace of steps yet.", links=links)
    # includes the checkpoint, like the phases; `time/step_s` does not
    seconds = sum(step.end_s - step.start_s for step in steps) / len(steps)
    name, number = held.most_common(1)[0] if held else (total.most_common(1)[0][0], 0)
    text = (
        f"Mostly to {total.most_common(1)[0][0]}. A step takes {seconds:.1f} s; in {number} of {len(steps)} steps the "
        f"bottleneck was {_PHASE_NAMES.get(name, name)}."
    )
    figures = [(f"{name}, s per step", round(spent / len(steps), 3)) for name, spent in total.most_common(5)]
    return Answer(id="time", question=question, text=text, figures=figures, links=links)


_PHASE_NAMES = {"wait": "waiting for rollouts", "generate": "generation"}


def _explain_token_updates(facts: RunFacts) -> Answer:
    question = "Which tokens did the loss push?"
    rollouts = facts.rollouts
    advantage = np.where(rollouts.get_column("kind") == KINDS.index("train"), rollouts.get_column("advantage"), np.nan)
    places = np.flatnonzero(np.isfinite(advantage))
    if not len(places):
        text = "No answer has an advantage, because nothing has been trained yet."
        if facts.is_supervised:
            text = "This run learns from fixed examples, so no token has an advantage."
        elif facts.pipeline_name not in ("", "rlvr", "agentic"):
            text = f"The pipeline {facts.pipeline_name} has no advantages: all trained tokens have the same weight."
        if facts.files_left:
            text = f"{facts.files_left} rollout files have not been read yet."
        return Answer(id="pushed", question=question, text=text)
    newest = places[rollouts.get_column("step")[places] == rollouts.get_column("step")[places].max()]
    down, up = newest[advantage[newest].argmin()], newest[advantage[newest].argmax()]
    step = int(rollouts.get_column("step")[newest[0]])
    last = f"the last step read so far ({facts.files_left} files are left)" if facts.files_left else "the last step"
    text = (
        f"In step {step} ({last}), the advantages of {len(newest)} answers are between {advantage[down]:.2f} and "
        f"{advantage[up]:.2f}. A token is pushed by advantage times ratio, and not at all if the ratio is clipped."
    )
    links = [
        build_link(name, "rollout", row=int(rollouts.get_column("row")[place]), tab="tokens", by="push")
        for name, place in (("tokens pushed down most", down), ("tokens pushed up most", up))
    ]
    links.append(build_link("all trained rollouts", "rollouts", trained="true", sort="advantage", desc=0))
    return Answer(id="pushed", question=question, text=text, links=links)


def _compare_configurations(facts: RunFacts) -> Answer:
    question = "What differs between this run and another?"
    if not facts.others:
        text = "There is no other run: give several runs, as in `roll dashboard runs/a runs/b`."
        return Answer(id="differs", question=question, text=text)
    nearest = min(facts.others, key=lambda other: other[2])
    text = f"The most similar run is {nearest[1]}: {nearest[2]} keys differ, including the name."
    links = [
        build_link(f"compared with {name}: {number} keys", "overview", runs=f"{facts.run},{other}", show="differences")
        for other, name, number in facts.others
    ]
    return Answer(id="differs", question=question, text=text, links=links)


def _estimate_cost(facts: RunFacts) -> Answer:
    question = "What would it cost on N GPUs?"
    links = [build_link("plans and configuration", "plan")]
    if not facts.plans:
        text = (
            "This run has no plan. `roll plan` with the run's config.yaml, --device and --devices estimates the time "
            "of a step; save the output as plan.txt in the run directory to show it here. `roll simulate --calibrate` "
            "fits the simulator to this run."
        )
        return Answer(id="cost", question=question, text=text, tone="warn", links=links)
    names = ", ".join(str(plan["name"]) for plan in facts.plans)
    lines = [line.strip() for plan in facts.plans for line in str(plan.get("text") or "").splitlines()]
    said = next((line for line in lines if "s per step" in line or "step takes" in line), "")
    text = f"{said or 'The run was planned or simulated'} ({names})."
    return Answer(id="cost", question=question, text=text, tone="good", links=links)


def _explain_reward_hacking(facts: RunFacts) -> Answer:
    question = "Does the policy exploit the reward?"
    names = {
        "hacking/length_reward_correlation": "correlation of length and reward",
        "hacking/repeated_text_share": "answers given to several prompts",
        "hacking/self_repetition_share": "answers with mostly repetitions",
        "hacking/shared_ngram_share": "8-grams shared by half of the prompts",
    }
    found = {label: facts.compute_mean(name, slice(-RECENT_STEPS, None)) for name, label in names.items()}
    links = [
        build_link("their curves", "overview", runs=facts.run, q="hacking"),
        build_link("answers", "rollouts", sort="reward", desc=1),
    ]
    if all(value is None for value in found.values()):
        text = "The run recorded no reward hacking signals (hacking/…)."
        if facts.is_supervised:
            text = "This run learns from fixed examples, so it has no reward."
        return Answer(id="fooled", question=question, text=text)
    raised = [alarm for alarm in facts.alarms if alarm.alarm in _HACKING_ALARMS]
    correlation = names["hacking/length_reward_correlation"]
    shares = [value for label, value in found.items() if label != correlation and value is not None]
    if raised:
        text, tone = f"Probably: {raised[-1].message}", "bad"
    elif max(shares, default=0.0) > 0:
        share = f"{max(shares):.0%}"
        text = f"In the last {RECENT_STEPS} steps, up to {share} of the answers are repetitive; read some of them."
        tone = "warn"
    else:
        text = f"There is no sign of it in the last {RECENT_STEPS} steps: no answers are repeated or repetitive."
        tone = "good"
    return Answer(id="fooled", question=question, text=text, tone=tone, figures=list(found.items()), links=links)


_HACKING_ALARMS = (
    "length_drift_above",
    "repeated_text_above",
    "shared_ngrams_above",
    "self_repetition_above",
    "disagreement_above",
)
