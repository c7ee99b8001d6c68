"""`docs/questions.md`, written from the questions below:  python tools/questions_page.py

`benchmarks/questions.py` (`make bench NAME=questions`) asks each of them in a browser, and makes the pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["QUESTIONS", "Click", "Question", "page", "write_page"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "questions.md"


@dataclass(frozen=True, kw_only=True)
class Click:
    """What is clicked, as people and screen readers find it."""

    name: str
    role: str = "link"
    within: str = ""
    """The region of the page that it is in; empty for all of it."""
    exact: bool = False
    shown: str = ""
    """What the documentation calls it; empty for its name."""

    def __str__(self) -> str:
        return f"**{self.shown or self.name.rstrip(':')}**"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, the clicks that answer it, and what the page says then."""

    id: str
    title: str
    clicks: tuple[Click, ...]
    shows: tuple[str, ...]
    """Regular expressions, each of which must match the page's text."""
    says: str
    """For the documentation."""


def _asked(run: str) -> Click:
    return Click(name=f"Answers about {run}", shown=f"answers of {run}", exact=True)


def _in(question: str, name: str) -> Click:
    return Click(name=name, within=question)


_FLAT = "Why is my reward flat?"
_FILTERED = "Which answers were filtered, and why?"
_POLICY = "Is it off-policy?"
_WEIGHTS = "Did my weights arrive?"
_ONCE = "Was my data used exactly once?"
_STOPPED = "Why did it stop?"
_TIME = "Where does the time go?"
_PUSHED = "Which tokens did the loss push?"
_DIFFERS = "What differs between this run and another?"
_COST = "What would it cost on N GPUs?"
_FOOLED = "Does the policy exploit the reward?"

QUESTIONS = (
    Question(
        id="flat",
        title=_FLAT,
        clicks=(_asked("flat"),),
        shows=(_FLAT, r"\d\d% of answers are truncated at 4 tokens", r"the rewards within each group are equal"),
        says="The card checks the causes that [Why does my reward not rise?](tutorials/not-learning.md) lists: "
        "truncated answers, groups in which all rewards are equal, gradients that are not finite, a learning rate of 0,"
        " different log-probs of engine and trainer, and steps that are too large. In this run, answers are truncated "
        "after four tokens.",
    ),
    Question(
        id="filtered",
        title="Which answers were filtered at step 30, and why?",
        clicks=(_asked("learns"), _in(_FILTERED, "step 30:")),
        shows=(r"\d+ of [\d,]+", r"✓ correct"),
        says="The card counts the filtered answers by the reason that the ledger recorded, and links to every step. "
        "The linked table shows only answers that were not trained (its address contains `trained=false`). Press `s` "
        "to show all answers of a row's group side by side.",
    ),
    Question(
        id="off-policy",
        title=_POLICY,
        clicks=(_asked("learns"), _in(_POLICY, "stale answers")),
        shows=(r"\d+ of [\d,]+",),
        says="The card shows the largest staleness of a trained answer, the upper bound that the async ratio sets, and "
        "the difference between the log-probs of engine and trainer on the same tokens. The linked table lists the "
        "answers with the highest staleness first.",
    ),
    Question(
        id="weights",
        title=_WEIGHTS,
        clicks=(_asked("learns"), _in(_WEIGHTS, "every sync")),
        shows=(r"Syncs", r"probe_change_missed", r"272"),
        says="The card shows whether every engine confirmed the checksum of every tensor, and the result of the probe, "
        "which compares how much the log-probs of trainer and engine have changed ([Weight sync](weight-sync.md)).",
    ),
    Question(
        id="once",
        title=_ONCE,
        clicks=(_asked("learns"), _in(_ONCE, "the ledger")),
        shows=(r"what became of \d+ draws", r"trained"),
        says="The card reads the ledger of the newest checkpoint. It shows whether a draw number is missing or "
        "repeated, how many different prompts were drawn, and how often each prompt was drawn. The linked view "
        "**Health** shows the outcomes of the draws with their reasons.",
    ),
    Question(
        id="stopped",
        title=_STOPPED,
        clicks=(_asked("flat"), _in(_STOPPED, "log and alarms")),
        shows=(r"no_signal", r"step \d"),
        says="The card shows whether the run finished, was stopped by an alarm, failed with an error, or was killed. "
        "The linked view **Health** shows the alarms with the metrics that caused them, and the end of the log.",
    ),
    Question(
        id="time",
        title=_TIME,
        clicks=(_asked("learns"), _in(_TIME, "lanes and phases")),
        shows=(r"What held each step back", r"in \d+ of \d+ steps"),
        says="The card shows the duration of each phase of a step in seconds. The linked view shows a timeline with "
        "one lane per role. Click a step to zoom into it.",
    ),
    Question(
        id="pushed",
        title=_PUSHED,
        clicks=(_asked("learns"), _in(_PUSHED, "tokens pushed down most")),
        shows=(r"push", r"advantage", r"ratio"),
        says="The push of a token is the weight of its log-prob in the gradient. It is the token's advantage times its "
        "ratio, or 0 if the loss clips the token. The link opens the answer with the lowest advantage in the last "
        "trained step.",
    ),
    Question(
        id="differs",
        title=_DIFFERS,
        clicks=(_asked("learns"), _in(_DIFFERS, "compared with flat")),
        shows=(r"What the configurations differ in", r"rollout\.max_new_tokens", r"rollout\.scheduling\.async_ratio"),
        says="The page lists the configuration keys that differ, and shows the curves of both runs.",
    ),
    Question(
        id="cost",
        title=_COST,
        clicks=(_asked("learns"), _in(_COST, "plans and configuration")),
        shows=(r"plan\.txt", r"h100"),
        says="The page shows the output of `roll plan` for this run's workload on eight H100 GPUs, next to the "
        "measurements of the run. The last section of this page describes how to add a plan to a run.",
    ),
    Question(
        id="fooled",
        title=_FOOLED,
        clicks=(_asked("learns"), _in(_FOOLED, "their curves")),
        shows=(r"hacking/length_reward_correlation", r"hacking/repeated_text_share"),
        says="Each signal of reward hacking has a curve and an alarm ([Metrics](metrics.md)). The signals are longer "
        "answers with higher rewards, the same answer to many prompts, answers that repeat themselves, and phrases "
        "that occur in the answers to half of the prompts.",
    ),
)

_HEAD = """\
# Ask questions about a run

*Generated from `tools/questions_page.py`.*

To find out what happened in a run, open the dashboard:

```bash
roll dashboard runs
```

This page lists common questions about a run. For each question, it shows which links to click in the
[dashboard](dashboard.md), starting from the list of runs. The view **Answers** (keys `g a`) answers each question in a
sentence with numbers, on a card that links to the data. The view reads only the files of a run, so it works for
running, finished and killed runs.

The pictures show two variants of the quickstart. The run `learns` is asynchronous, and the run `flat` limits answers to
four tokens. `make bench NAME=questions` trains both, performs these clicks in a browser, takes the pictures, and fails
if the dashboard does not show an answer. Each run has a link **answers** in the list of runs. On this page,
**answers of flat** means this link of the run `flat`.
"""
_TAIL = """\
## Add a plan to a run

```bash
roll simulate --calibrate runs/learns
roll plan runs/learns/calibration/workload.yaml device=h100 placement.generation=7 > runs/learns/plan.txt
```

To show a plan in the dashboard, save it as `plan.txt` in the run directory. The first command fits the simulator to the
run. The second command searches for the fastest way to do the same work on eight devices of another type
([Simulation](simulation.md)).
"""


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    for question in QUESTIONS:
        clicks = ", then ".join(map(str, question.clicks))
        lines += [f"## {question.title}", "", f"Click {clicks}.", "", question.says, ""]
        lines += [f"![the dashboard's answer](questions/{question.id}.png)", ""]
    return "\n".join([*lines, _TAIL])


def write_page() -> None:
    """Write it."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write_page()
