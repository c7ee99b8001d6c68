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
        says="The card checks the causes in the order of [Why does my reward not rise?](tutorials/not-learning.md): "
        "truncated answers, groups without different rewards, gradients that are not finite, a learning rate of 0,"
        " an engine that disagrees with the trainer, steps that are too large. In this run, answers have at most "
        "four tokens.",
    ),
    Question(
        id="filtered",
        title="Which answers were filtered at step 30, and why?",
        clicks=(_asked("learns"), _in(_FILTERED, "step 30:")),
        shows=(r"\d+ of [\d,]+", r"✓ correct"),
        says="The card counts the reasons of the ledger and has a link for every step. The linked table shows only "
        "answers that were not trained (`trained=false` in its address); `s` shows the group of a row side by "
        "side.",
    ),
    Question(
        id="off-policy",
        title=_POLICY,
        clicks=(_asked("learns"), _in(_POLICY, "stale answers")),
        shows=(r"\d+ of [\d,]+",),
        says="The card shows the largest staleness of a trained answer, the bound of the async ratio, and the "
        "difference of engine and trainer on the same tokens. The table is sorted by staleness, oldest answers "
        "first.",
    ),
    Question(
        id="weights",
        title=_WEIGHTS,
        clicks=(_asked("learns"), _in(_WEIGHTS, "every sync")),
        shows=(r"Syncs", r"probe_change_missed", r"272"),
        says="Every engine confirms the checksum of every tensor. A probe then compares the change of the trainer's "
        "log-probs with that of the engine's ([Weight sync](weight-sync.md)).",
    ),
    Question(
        id="once",
        title=_ONCE,
        clicks=(_asked("learns"), _in(_ONCE, "the ledger")),
        shows=(r"what became of \d+ draws", r"trained"),
        says="The card reads the ledger of the newest checkpoint: whether its draws are numbered without a gap or a "
        "repetition, the number of their prompts, and how often each was drawn. Health shows the fate of the "
        "draws, with the reasons.",
    ),
    Question(
        id="stopped",
        title=_STOPPED,
        clicks=(_asked("flat"), _in(_STOPPED, "log and alarms")),
        shows=(r"no_signal", r"step \d"),
        says="The card derives from settings, alarms and the log whether the run finished, was stopped by an alarm, "
        "failed with an error, or was killed. Health shows the alarms with the rows that caused them, and the end "
        "of the log.",
    ),
    Question(
        id="time",
        title=_TIME,
        clicks=(_asked("learns"), _in(_TIME, "lanes and phases")),
        shows=(r"What held each step back", r"in \d+ of \d+ steps"),
        says="The card shows the phases of a step, in seconds; the lanes show when each role worked. A click on a step "
        "zooms into it.",
    ),
    Question(
        id="pushed",
        title=_PUSHED,
        clicks=(_asked("learns"), _in(_PUSHED, "tokens pushed down most")),
        shows=(r"push", r"advantage", r"ratio"),
        says="The push of a token is the factor of its log-prob in the gradient: its advantage times its ratio, 0 where"
        " the gate clips it. The link opens the answer with the lowest advantage of the last trained step.",
    ),
    Question(
        id="differs",
        title=_DIFFERS,
        clicks=(_asked("learns"), _in(_DIFFERS, "compared with flat")),
        shows=(r"What the configurations differ in", r"rollout\.max_new_tokens", r"rollout\.scheduling\.async_ratio"),
        says="The page lists the configuration keys that differ, with the curves of both runs below.",
    ),
    Question(
        id="cost",
        title=_COST,
        clicks=(_asked("learns"), _in(_COST, "plans and configuration")),
        shows=(r"plan\.txt", r"h100"),
        says="The page shows the output of `roll plan` for this run's workload on eight H100 GPUs, next to the "
        "measurements; the last section shows how to add a plan.",
    ),
    Question(
        id="fooled",
        title=_FOOLED,
        clicks=(_asked("learns"), _in(_FOOLED, "their curves")),
        shows=(r"hacking/length_reward_correlation", r"hacking/repeated_text_share"),
        says="Each signal of reward hacking has a curve and an alarm ([Metrics](metrics.md)): longer answers with "
        "higher rewards, the same answer to many prompts, answers that repeat themselves, phrases in the answers "
        "to half of the prompts.",
    ),
)

_HEAD = """\
# Ask questions about a run

*Written from `tools/questions_page.py`.*

```bash
roll dashboard runs
```

This page lists common questions about a run, and the clicks in the [dashboard](dashboard.md) that answer them,
starting from its first page. The view **Answers** (key `g a`) answers each question in a sentence with numbers; its
links lead to the data. It reads only the files of a run, so it works for running, finished and killed runs.

`make bench NAME=questions` trains the two runs of this page (both the quickstart: `learns` is asynchronous, `flat`
limits answers to four tokens), performs these clicks in a browser, fails if an answer is not on the page, and takes the
pictures.
"""
_TAIL = """\
## Add a plan to a run

```bash
roll simulate --calibrate runs/learns
roll plan runs/learns/calibration/workload.yaml device=h100 placement.generation=7 > runs/learns/plan.txt
```

The first command fits the simulator to the run. The second searches for the fastest use of eight devices of another
type for the same work ([Simulation](simulation.md)). The dashboard shows the output of `roll plan` if it is in
`plan.txt` of the run directory.
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
