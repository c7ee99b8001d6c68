"""Explains why a run stopped, from its summary or, for runs of older versions, from its alarms and log."""

from __future__ import annotations

from roll.dashboard.answer import Answer, build_link
from roll.dashboard.run_facts import RunFacts

__all__ = ["explain_end"]

_MAX_MESSAGE_LENGTH = 600
_RESUME_HINT = " `roll resume` continues from the newest checkpoint."


def explain_end(facts: RunFacts) -> Answer:
    """Answer the question why the run stopped."""
    step = facts.last_step
    text, tone = _explain_ending(facts, step)
    links = [build_link("log and alarms", "health", show="Alarms")]
    if facts.end_kind == "alarm" and step and facts.has_rollouts:
        links.append(build_link("answers of that step", "rollouts", step_min=step, step_max=step, kind="train"))
    figures = [("last step", step), ("configured steps", facts.num_steps)]
    return Answer(id="stopped", question="Why did it stop?", text=text, tone=tone, figures=figures, links=links)


def _explain_ending(facts: RunFacts, step: int) -> tuple[str, str]:
    of_total = f" of {facts.num_steps:.0f}" if facts.num_steps else ""
    after = f"after step {step}{of_total}" if step else "before its first step"
    message = _shorten(facts.end_message)
    if facts.status == "running":
        return f"The run has not stopped: it is at step {step}{of_total}.", "good"
    match facts.end_kind:
        case "finished" if facts.num_trained_steps == 0:
            return f"The run completed all {step} steps, but none of them updated the weights.", "bad"
        case "finished":
            return f"The run finished all {step} steps.", "good"
        case "alarm":
            return f"An alarm stopped the run {after}: {message}.{_RESUME_HINT}", "bad"
        case "interrupted":
            return f"The run was interrupted {after} ({message}).{_RESUME_HINT}", "warn"
        case "error":
            return f"The run failed {after}: {message}.{_RESUME_HINT}", "bad"
    text = f"The run ended {after}, and there is no summary with the cause"
    wrong = [line for line in facts.log if " ERROR " in line or " CRITICAL " in line]
    last = wrong[-1] if wrong else (facts.log[-1] if facts.log else "")
    text += f"; the last line of the log: {_shorten(last)}" if last else ""
    return f"{text}. The process was killed, or the machine failed.{_RESUME_HINT}", "bad"


def _shorten(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _MAX_MESSAGE_LENGTH else f"{text[:_MAX_MESSAGE_LENGTH]} ..."
