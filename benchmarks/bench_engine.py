"""Generated tokens per second of vLLM on a CPU: ROLL's settings beside each option of vLLM's changed alone.

    make bench NAME=engine

The load is a step of the quickstart's, 8 prompts x 8 answers of 32 tokens that no end token cuts short. Engines are
processes of their own and take turns, changed | default | changed, so that a machine that grows slower slows both: a
ratio is that of two neighbouring rounds, and a figure the median of the ratios. Whose turn it is not, is stopped, since
threads that spin while they wait would slow the others. What is better alone is then tried
together. `--only` measures some options again, and keeps the figures of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from _gallery import BEGIN, END
from _report import RESULTS, ROOT, report

PAGE = ROOT / "docs" / "benchmarks" / "engine.md"
WARM_UPS, REPEATS = 2, 5
AT_ONCE = 4
"""Changed engines beside the default one; each takes some 1.5 GiB."""
TOGETHER = "together"
IDLE_S = 2.0
"""For which an engine that has started is watched doing nothing."""
BETTER = 1.02
"""Ratio from which a change is tried together with others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What one side changes."""

    option: str
    """Of those with one `option`, the best is tried together with others."""
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of vLLM, or of `EngineSpec`."""
    variables: Mapping[str, str] = field(default_factory=dict)
    kind: str = "roll"


def _of(option: str, *values: Any) -> list[Setting]:
    return [Setting(option=option, name=f"{option}={value}", options={option: value}) for value in values]


def _variable(variable: str, *values: str) -> list[Setting]:
    return [Setting(option=variable, name=f"{variable}={value}", variables={variable: value}) for value in values]


def _bound(cores: str, **variables: str) -> Setting:
    """vLLM binds threads where the worker has a process of its own only."""
    variables = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | variables
    name = f"worker in its own process, threads {cores}"
    return Setting(
        option="worker", name=name, options={"distributed_executor_backend": "mp"}, variables=variables
    )  # fmt: skip


def _intel(**variables: str) -> Setting:
    library = str(Path(sys.prefix) / "lib" / "libiomp5.so")
    name = ", ".join(["Intel's OpenMP", *(f"{name}={value}" for name, value in variables.items())])
    return Setting(option="OpenMP", name=name, variables={"LD_PRELOAD": library} | variables)


PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
"""What an engine's own process gets from `roll.inference.vllm.launch`."""
DEFAULT = Setting(option="default", name="ROLL's settings")
SETTINGS = [
    Setting(option="nothing", name="nothing"),
    *_variable("GOMP_SPINCOUNT", "1000", "100000"),
    *_variable("OMP_WAIT_POLICY", "active"),
    *_of("block_size", 16, 64, 128),
    *_of("enable_prefix_caching", False),
    *_of("enable_chunked_prefill", True),
    *_of("max_num_seqs", 32, 128),
    *_of("max_num_batched_tokens", 2048, 8192),
    *_of("enforce_eager", False),
    _bound("nobind"),
    _bound("auto"),
    _bound("0-1"),
    *_of("num_threads", 1),
    *_variable("VLLM_CPU_ATTN_SPLIT_KV", "0"),
    *_variable("VLLM_USE_V2_MODEL_RUNNER", "1"),
    _intel(),
    _intel(KMP_BLOCKTIME="1"),
    Setting(option="kv_cache_bytes", name="kv_cache_bytes=1 GiB", options={"kv_cache_bytes": 2**30}),
    *_of("dtype", "float32"),
    *_of("scheduling_policy", "fcfs"),
    Setting(option="seeds", name="requests without seeds", options={"seeds": False}),
    Setting(
        option="LLM", name="vLLM's LLM, in process", kind="llm",
        variables=PASSIVE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    ),
    Setting(
        option="LLM", name="vLLM's LLM, core in its own process", kind="llm",
        variables=PASSIVE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, options={"distributed_executor_backend": "mp"},
    ),
]  # fmt: skip
NO_ENGINE_SETTING = {"nothing", "LLM", "seeds", "dtype"}
"""Options that are measured to be known: no run could use them, or it would compute something else."""


class Side:
    """An engine in a process of its own."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        call = [sys.executable, str(Path(__file__).with_name("_engine_sides.py")), setting.kind]
        self._process = subprocess.Popen(
            [*call, json.dumps(dict(setting.options))],
            cwd=ROOT,
            env=os.environ | dict(setting.variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.idle_share = 0.0
        """Of a core, while it waits."""

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        self._process.wait(30)

    def started(self) -> dict[str, Any] | None:
        """Wait for it; `None` where vLLM refuses the setting."""
        answer = self._read()
        if answer is not None:
            used = self._cpu_s()
            time.sleep(IDLE_S)
            self.idle_share = (self._cpu_s() - used) / IDLE_S
            self._signal(signal.SIGSTOP)
        return answer

    def play(self) -> float:
        """A round: tokens per second."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._read()
        if answer is None:
            raise SystemExit(f"{self.setting.name}: its engine ended")
        self._signal(signal.SIGSTOP)
        return answer["num_tokens"] / answer["seconds"]

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def _signal(self, number: signal.Signals) -> None:
        """To all its processes, where any is left; vLLM's have a group of their own."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _cpu_s(self) -> float:
        """CPU time of all its processes so far."""
        times = [process.cpu_times() for process in self._processes()]
        return sum(t.user + t.system for t in times)

    def _processes(self) -> list[psutil.Process]:
        if self._process.poll() is not None:
            return []
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]


def neighbours(num_changed: int) -> list[int | None]:
    """Whose turn it is: numbers of changed sides, each beside one turn of the default side (`None`)."""
    order: list[int | None] = []
    for first in range(0, num_changed, 2):
        order += [first, None, *([first + 1] if first + 1 < num_changed else [])]
    return order


def compare(default: Side, expected: Sequence[float], settings: Sequence[Setting]) -> dict[str, dict[str, Any]]:
    """Rounds of some settings between those of the default; by name."""
    with ExitStack() as stack:
        changed = [stack.enter_context(Side(setting)) for setting in settings]
        answers = {side.setting.name: side.started() for side in changed}
        found: dict[str, dict[str, Any]] = {name: {"refused": True} for name, answer in answers.items() if not answer}
        sides = [side for side in changed if answers[side.setting.name]]
        order = neighbours(len(sides))
        pairs: dict[int, list[tuple[float, float]]] = {number: [] for number in range(len(sides))}
        for repeat in range(WARM_UPS + REPEATS):
            rates = [(default if number is None else sides[number]).play() for number in order]
            for place, number in enumerate(order):
                if number is not None and repeat >= WARM_UPS:
                    beside = place + 1 if number % 2 == 0 else place - 1
                    pairs[number].append((rates[place], rates[beside]))
    for number, side in enumerate(sides):
        name = side.setting.name
        scored = (answers[name] or {})["logprobs"]
        ratios = [own / other for own, other in pairs[number]]
        found[name] = {
            "option": side.setting.option,
            "tokens_per_s": statistics.median(own for own, _ in pairs[number]),
            "default_tokens_per_s": statistics.median(other for _, other in pairs[number]),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "start_s": (answers[name] or {})["start_s"],
            "idle_cpu_percent": 100 * side.idle_share,
            "largest_logprob_difference": max(
                (abs(a - b) for a, b in zip(scored, expected, strict=False)), default=None
            ),
        }
    return found


def together(figures: Mapping[str, Mapping[str, Any]]) -> Setting:
    """The best setting of every option that is better alone."""
    best: dict[str, Setting] = {}
    for setting in SETTINGS:
        ratio = figures.get(setting.name, {}).get("ratio", 0.0)
        if setting.option in NO_ENGINE_SETTING or ratio < BETTER:
            continue
        if setting.option not in best or ratio > figures[best[setting.option].name]["ratio"]:
            best[setting.option] = setting
    options: dict[str, Any] = {}
    variables: dict[str, str] = {}
    for setting in best.values():
        options |= setting.options
        variables |= setting.variables
    names = ", ".join(setting.name for setting in best.values())
    return Setting(
        option=TOGETHER, name=f"the best {TOGETHER}: {names or 'nothing'}", options=options, variables=variables
    )


def table(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown, the fastest first."""
    lines = [
        "| changed setting | tokens/s | tokens/s with ROLL's settings | ratio (median) | ratio, lowest … highest "
        "| time to start the engine, s | CPU use when idle, % of a core | largest difference of log-probs |",
        "|---|" + "---:|" * 7,
    ]
    measured = {name: found for name, found in figures.items() if "ratio" in found}
    for name, found in sorted(measured.items(), key=lambda item: -item[1]["ratio"]):
        differ = found["largest_logprob_difference"]
        lines.append(
            f"| {name} | {found['tokens_per_s']:,.0f} | {found['default_tokens_per_s']:,.0f} "
            f"| **{found['ratio']:.2f}** | {min(found['ratios']):.2f} … {max(found['ratios']):.2f} "
            f"| {found['start_s']:.0f} | {found['idle_cpu_percent']:.1f} "
            f"| {'not measured' if differ is None else f'{differ:.1g}'} |"
        )
    refused = ", ".join(name for name, found in figures.items() if found.get("refused"))
    return [*lines, "", f"vLLM rejects these settings on a CPU: {refused}."] if refused else lines


def write_page(lines: Sequence[str]) -> None:
    """Put the table between the marks of the page."""
    text = PAGE.read_text()
    made = "\n".join([BEGIN, "", *lines, "", END])
    PAGE.write_text(text[: text.index(BEGIN)] + made + text[text.index(END) + len(END) :])


def main() -> None:
    """Measure, write the page, and print the record last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*dict.fromkeys(setting.option for setting in SETTINGS), TOGETHER]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="OPTION", help=", ".join(names))
    only = parser.parse_args().only
    settings = [setting for setting in SETTINGS if setting.option in only]
    kept = RESULTS / "engine.json"
    figures: dict[str, Any] = json.loads(kept.read_text())["figures"] if only != names and kept.exists() else {}

    def note(found: Mapping[str, Any]) -> None:
        figures.update(found)
        print("\n".join(table(found)), file=sys.stderr, flush=True)

    with Side(DEFAULT) as default:
        ready = default.started()
        if ready is None:
            raise SystemExit("the engine does not start")
        for first in range(0, len(settings), AT_ONCE):
            note(compare(default, ready["logprobs"], settings[first : first + AT_ONCE]))
        if TOGETHER in only:
            figures = {name: found for name, found in figures.items() if not name.startswith(f"the best {TOGETHER}")}
            note(compare(default, ready["logprobs"], [together(figures)]))
    write_page(table(figures))
    report("engine", figures)


if __name__ == "__main__":
    main()
