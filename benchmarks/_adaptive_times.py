"""Adaptive limits on recorded times of programs: the time saved on incorrect ones, and the number of correct ones that
are stopped.

    python benchmarks/_adaptive_times.py     records the times again, in `tests/recorded/humaneval_times.json`

The correct programs are HumanEval's solutions, run three times. The incorrect ones are the same solutions with one
operator, constant or comparison changed, if the tests then fail. Each runs in a forked process; a program that has not
ended after `RECORD_CPU_S` of CPU time is recorded as `null`, and counts as one that never ends.
"""

import ast
import copy
import gzip
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.rewards.adaptive_limits import AdaptiveLimits

HUMANEVAL = Path(__file__).parents[2] / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"
RECORDED = Path(__file__).parents[1] / "tests" / "recorded" / "humaneval_times.json"
RECORD_CPU_S = 1
CONFIGURED_S = 30.0
MUTANTS_PER_TASK = 8
_SWAPPED: dict[type[Any], type[Any]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}


def mutate(source: str) -> Iterator[str]:
    """Yield versions of a program with one operator or number changed."""
    tree = ast.parse(source)
    for index, node in enumerate(ast.walk(tree)):
        changed = copy.deepcopy(tree)
        target = list(ast.walk(changed))[index]
        if isinstance(target, ast.BinOp | ast.AugAssign) and type(target.op) in _SWAPPED:
            target.op = _SWAPPED[type(target.op)]()
        elif isinstance(target, ast.Compare) and type(target.ops[0]) in _SWAPPED:
            target.ops[0] = _SWAPPED[type(target.ops[0])]()
        elif isinstance(node, ast.Constant) and type(node.value) is int and isinstance(target, ast.Constant):
            target.value = node.value - 1
        else:
            continue
        yield ast.unparse(ast.fix_missing_locations(changed))


def run(program: str) -> tuple[bool, float | None]:
    """Run a program in a forked process: return True if it succeeds, and its CPU time, or `None` if it did not end."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (RECORD_CPU_S, RECORD_CPU_S + 1))
        resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        try:
            exec(compile(program, "program", "exec"), {"__name__": "program"})
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status, used = os.wait4(child, 0)
    ended = not (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL))
    return status == 0, round(used.ru_utime + used.ru_stime, 4) if ended else None


def record() -> None:
    """Run the programs, and write their times."""
    draw = random.Random(0)
    with gzip.open(HUMANEVAL, "rt") as file:
        rows = [json.loads(line) for line in file]
    tasks = []
    for row in rows:
        solution = row["prompt"] + row["canonical_solution"]
        tests = f"\n{row['test']}\ncheck({row['entry_point']})\n"
        right = [run(solution + tests) for _ in range(3)]
        mutants = list(mutate(solution))
        draw.shuffle(mutants)
        wrong = [cpu_s for ok, cpu_s in (run(mutant + tests) for mutant in mutants[:MUTANTS_PER_TASK]) if not ok]
        tasks.append({"task": row["task_id"], "right": [cpu_s for ok, cpu_s in right if ok], "wrong": wrong})
    lines = ",\n".join(json.dumps(task) for task in tasks)
    RECORDED.write_text(f"[\n{lines}\n]\n")


def replay(num_right: int = 10_000, seed: int = 0) -> dict[str, float]:
    """Apply adaptive limits to a random sequence of recorded answers of which `num_right` are correct."""
    draw = random.Random(seed)
    tasks = [task for task in json.loads(RECORDED.read_text()) if task["right"] and task["wrong"]]
    limits = AdaptiveLimits(2.0, CONFIGURED_S, 1.5, min_right=3)
    counts = {"right": 0, "right_cut": 0, "wrong": 0, "wrong_cut": 0}
    fixed_s = adaptive_s = 0.0
    while counts["right"] < num_right:
        task = draw.choice(tasks)
        limit_s = limits.compute_cpu_limit_s(task["task"], 0)
        if draw.random() < 0.5:
            cpu_s = draw.choice(task["right"])
            counts["right"] += 1
            counts["right_cut"] += cpu_s > limit_s
            limits.record_pass(task["task"], 0, cpu_s)
            continue
        recorded = draw.choice(task["wrong"])
        cpu_s = CONFIGURED_S if recorded is None else recorded
        counts["wrong"] += 1
        counts["wrong_cut"] += cpu_s > limit_s
        fixed_s += min(cpu_s, CONFIGURED_S)
        adaptive_s += min(cpu_s, limit_s)
    return {**counts, "wrong_fixed_s": fixed_s, "wrong_adaptive_s": adaptive_s, "speedup": fixed_s / adaptive_s}


if __name__ == "__main__":
    record()
    json.dump(replay(), sys.stdout, indent=2)
