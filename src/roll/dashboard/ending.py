"""Why a run stopped: from its summary; for older runs, from its alarms and its log."""

from __future__ import annotations

from roll.dashboard.answer import Answer, link
from roll.dashboard.known import RunFacts

__all__ = ["explain_end"]

_LONGEST = 600
_RESUME = " `roll resume` continues from the newest checkpoint."


def explain_end(known: RunFacts) -> Answer:
    """Explain why the run stopped."""
    step = known.step
    text, tone = _explain(known, step)
    links = [link("log and alarms", "health", show="Alarms")]
    if known.end_kind == "alarm" and step and known.has_rollouts:
        links.append(link("answers of that step", "rollouts", step_min=step, step_max=step, kind="train"))
    figures = [("last step", step), ("steps asked for", known.num_steps)]
    return Answer(id="stopped", question="Why did it stop?", text=text, tone=tone, figures=figures, links=links)


def _explain(known: RunFacts, step: int) -> tuple[str, str]:
    asked = f" of {known.num_steps:.0f}" if known.num_steps else ""
    after = f"after step {step}{asked}" if step else "before its first step"
    message = _shorten(known.end_message)
    if known.status == "running":
        return f"It has not: it is at step {step}{asked}.", "good"
    match known.end_kind:
        case "finished" if known.num_trained_steps == 0:
            return f"It made all {step} steps, but none of them trained anything.", "bad"
        case "finished":
            return f"It finished: all {step} steps were made.", "good"
        case "alarm":
            return f"An alarm stopped it {after}: {message}.{_RESUME}", "bad"
        case "interrupted":
            return f"It was interrupted {after} ({message}).{_RESUME}", "warn"
        case "error":
            return f"It failed {after}: {message}.{_RESUME}", "bad"
    text = f"It ended {after}, and no summary says why"
    wrong = [line for line in known.log if " ERROR " in line or " CRITICAL " in line]
    last = wrong[-1] if wrong else (known.log[-1] if known.log else "")
    text += f"; the last line of the log: {_shorten(last)}" if last else ""
    return f"{text}. The process was killed, or its machine went away.{_RESUME}", "bad"


def _shorten(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
