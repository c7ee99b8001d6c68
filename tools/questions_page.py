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
    return Click(name=f"Answers about {run}", shown=f"answers, of {run}", exact=True)


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
_FOOLED = "Is the reward being fooled?"

QUESTIONS = (
    Question(
        id="flat",
        title=_FLAT,
        clicks=(_asked("flat"),),
        shows=(_FLAT, r"\d\d% of answers are cut off at 4 tokens", r"no group had rewards that differ"),
        says="The causes that metrics know are gone through in the order of [A run that does not "
        "learn](tutorials/not-learning.md): answers that are cut off, groups without a difference, gradients that "
        "are not finite, a learning rate of nothing, an engine that disagrees, steps that are too large. Here "
        "answers have four tokens.",
    ),
    Question(
        id="filtered",
        title="Which answers were filtered at step 30, and why?",
        clicks=(_asked("learns"), _in(_FILTERED, "step 30:")),
        shows=(r"\d+ of [\d,]+", r"✓ correct"),
        says="The card counts reasons, as the ledger has them, and has a link for every step. The table it leads to "
        "is filtered to answers that no update was made from (`trained=false` in its address); `s` shows a row's "
        "group side by side.",
    ),
    Question(
        id="off-policy",
        title=_POLICY,
        clicks=(_asked("learns"), _in(_POLICY, "stale answers")),
        shows=(r"\d+ of [\d,]+",),
        says="The card says how many updates old an answer was at most when it was learnt from, what the async "
        "ratio allows, and how far engine and trainer differ on the same tokens. The table has the oldest answers "
        "first.",
    ),
    Question(
        id="weights",
        title=_WEIGHTS,
        clicks=(_asked("learns"), _in(_WEIGHTS, "every sync")),
        shows=(r"Syncs", r"probe_change_missed", r"272"),
        says="Every tensor's checksum is confirmed by every engine, then a text is probed: how far the trainer "
        "moved, and what of that the engine missed ([Weight sync](weight-sync.md)).",
    ),
    Question(
        id="once",
        title=_ONCE,
        clicks=(_asked("learns"), _in(_ONCE, "the ledger")),
        shows=(r"what became of \d+ draws", r"trained"),
        says="The card reads the newest checkpoint's ledger: whether its draws are numbered without a gap or a "
        "repeat, how many prompts they are of, and how often each was drawn. Health shows what became of them, and "
        "why.",
    ),
    Question(
        id="stopped",
        title=_STOPPED,
        clicks=(_asked("flat"), _in(_STOPPED, "log and alarms")),
        shows=(r"no_signal", r"step \d"),
        says="Done, stopped by an alarm, ended by an error, or killed: the card says which, from the settings, "
        "alarms and the log. Health has the alarms with the rows that caused them, and the log's last lines.",
    ),
    Question(
        id="time",
        title=_TIME,
        clicks=(_asked("learns"), _in(_TIME, "lanes and phases")),
        shows=(r"What held each step back", r"in \d+ of \d+ steps"),
        says="The card has the phases of a step, in seconds; the lanes show who worked when. A click on a step "
        "zooms into it.",
    ),
    Question(
        id="pushed",
        title=_PUSHED,
        clicks=(_asked("learns"), _in(_PUSHED, "tokens pushed down most")),
        shows=(r"push", r"advantage", r"ratio"),
        says="A token's push is what its log-prob is multiplied with in the gradient: its advantage times its "
        "ratio, 0 where the gate clips it. The link opens the answer whose advantage was lowest in the last step "
        "that was trained.",
    ),
    Question(
        id="differs",
        title=_DIFFERS,
        clicks=(_asked("learns"), _in(_DIFFERS, "beside flat")),
        shows=(r"What the configurations differ in", r"rollout\.max_new_tokens", r"rollout\.scheduling\.async_ratio"),
        says="Keys with another value, both runs' curves below them.",
    ),
    Question(
        id="cost",
        title=_COST,
        clicks=(_asked("learns"), _in(_COST, "plans and configuration")),
        shows=(r"plan\.txt", r"h100"),
        says="What `roll plan` printed for this run's workload on eight H100, beside what was measured; see below "
        "how it got there.",
    ),
    Question(
        id="fooled",
        title=_FOOLED,
        clicks=(_asked("learns"), _in(_FOOLED, "their curves")),
        shows=(r"hacking/length_reward_correlation", r"hacking/repeated_text_share"),
        says="Longer answers that earn more, the same answer to many prompts, answers that repeat themselves, "
        "phrases that half of the prompts get: each has a curve and an alarm ([Metrics](metrics.md)).",
    ),
)

_HEAD = """\
# Questions to a run

*Written from `tools/questions_page.py`.*

```bash
roll dashboard runs
```

What people ask of a run, and the clicks in the [dashboard](dashboard.md) that answer it, from the page that it opens
with. The view **Answers** (key `g a`) says each in a sentence with its figures; its links lead to where the figures
come from. It reads the run's files alone, so it answers for a run that trains as for one that ended or was killed.

`make bench NAME=questions` trains the two runs that are asked here (both the quickstart: `learns` is asynchronous,
`flat` gives answers four tokens), performs these clicks in a browser, fails if the answer is not on the page, and
takes the pictures.
"""
_TAIL = """\
## How the plan got there

```bash
roll simulate --calibrate runs/learns
roll plan runs/learns/calibration/workload.yaml device=h100 placement.generation=7 > runs/learns/plan.txt
```

The first fits the simulator to the run, the second looks for the fastest use of eight devices of another kind for the
same work ([Simulation](simulation.md)). What `roll plan` prints, kept as `plan.txt` in the run's directory, is what
the dashboard shows.
"""


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    for question in QUESTIONS:
        clicks = ", ".join(map(str, question.clicks))
        lines += [f"## {question.title}", "", f"{clicks}.", "", question.says, ""]
        lines += [f"![the dashboard's answer](questions/{question.id}.png)", ""]
    return "\n".join([*lines, _TAIL])


def write_page() -> None:
    """Write it."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write_page()
