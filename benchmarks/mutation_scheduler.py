"""Does a bug in the scheduler show? Plants one at a time in a copy of its package, and runs random schedules and tests.

    make mutation NAME=scheduler                 # every planted bug must be caught; says by which seed and how
    make mutation NAME=scheduler ARGS="3 17"     # only these

A bug counts as caught when some schedule fails: an invariant is broken, or the program waits or runs forever. If all
schedules pass, the unit tests `TESTS` run: some bugs need a sequence of events that random schedules rarely contain.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from _scheduler_bugs import BUGS, Bug

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "roll"
NUM_SCHEDULES = int(os.environ.get("ROLL_SCHEDULES", "3000"))

TIME_LIMIT_S = 1800
TESTS = ("tests/unit/rollout/test_transitions.py", "tests/unit/rollout/test_fleet.py")

RUN = """
import logging, os, signal, sys
logging.disable(logging.CRITICAL)
from worlds.training import play, random_settings
def late(*_):  # an exception might be taken for the failure of an engine
    print(f"seed {seed}: the schedule goes round in circles", flush=True)
    os._exit(1)
signal.signal(signal.SIGALRM, late)
for seed in range(int(sys.argv[1])):
    signal.alarm(60)
    try:
        play(random_settings(seed))
    except BaseException as error:
        print(f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        sys.exit(1)
"""


def caught(bug: Bug) -> str:
    """How the schedules notice the bug; empty if they do not."""
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "roll"
        package.mkdir()
        for entry in SOURCE.iterdir():
            if entry.name == bug.package:
                shutil.copytree(entry, package / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (package / entry.name).symlink_to(entry)
        path = package / bug.package / bug.file
        text = path.read_text()
        if text.count(bug.old) != 1:
            raise SystemExit(f"'{bug.what}': its place in {bug.file} is found {text.count(bug.old)} times, not once")
        path.write_text(text.replace(bug.old, bug.new))
        environment = {**os.environ, "PYTHONPATH": f"{directory}:{ROOT / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", RUN, str(NUM_SCHEDULES)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return f"a schedule goes round in circles: no end within {TIME_LIMIT_S} s"
        if done.returncode:
            return done.stdout.strip() or done.stderr.strip().splitlines()[-1]
        tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *TESTS]
        done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True)
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        return failed[0].partition("::")[2].partition(" ")[0] if failed else ""


def main() -> None:
    """Plant every bug; fail if one is not caught."""
    missed = []
    wanted = set(map(int, sys.argv[1:])) or set(range(1, len(BUGS) + 1))
    for number, bug in enumerate(BUGS, 1):
        if number not in wanted:
            continue
        how = caught(bug)
        print(f"{number:2d}/{len(BUGS)} {'caught' if how else 'MISSED'}  {bug.what}  [{how[:110]}]", flush=True)
        if not how:
            missed.append(bug.what)
    caught_bugs = f"{len(wanted) - len(missed)} of {len(wanted)} planted bugs are caught"
    print(f"{caught_bugs} ({NUM_SCHEDULES} random schedules, tests)")
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
