"""What an answer uses is counted by the kernel and bounded from outside, whatever happens inside of its sandbox."""

from __future__ import annotations

import time
from typing import Any

import pytest
from unit.rewards.code.conftest import rollout

from roll.config.rewards.code import CodeReward
from roll.rewards.code import program
from roll.rewards.code.sandbox_programs.frames import add_length, pack
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.verifier import CodeVerifier

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.integration]

FORMS: dict[str, dict[str, Any]] = {
    "stdin": {"tests": [{"stdout": "1"}, {"stdout": "1"}]},
    "call": {"tests": [{"args": [], "returns": 1}, {"args": [], "returns": 1}], "entry_point": "f"},
    "assert": {"tests": ["def check(candidate):\n    assert candidate() == 1"], "entry_point": "f"},
}
DODGES = {
    "by children that nobody waits for": """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(100):
    if os.fork() == 0:
        while time.process_time() < 0.1: pass
        os._exit(0)
    time.sleep(0.1)
""",
    "by lifting the timer": """
import signal, time
signal.setitimer(signal.ITIMER_PROF, 0)
while time.process_time() < 1.6: pass
""",
}
STOP = """
import os, signal
os.kill(os.getppid(), signal.SIGSTOP)
"""
ANSWER = """
def work():
{work}
    return 1
f = work
if __name__ == "__main__": print(work())
"""


def _answer(work: str) -> str:
    lines = "\n".join(f"    {line}" for line in work.strip().splitlines())
    return f"```python\n{ANSWER.format(work=lines)}\n```"


def _verifier(boxes: CodeSandboxes) -> CodeVerifier:
    return CodeVerifier(CodeReward(type="code", min_cpu_s=0.2, max_cpu_s=0.5, wall_factor=2.0), boxes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dodge", DODGES)
async def test_code_reward_counted_time_the_limit_on_cpu_time_is_not_dodged(
    boxes: CodeSandboxes, form: str, dodge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "MIN_WALL_S", 200.0)  # so that only the other limit ends it before it is done
    verifier = _verifier(boxes)
    judgement = await verifier.judge(rollout(_answer(DODGES[dodge]), FORMS[form]))
    assert judgement.verdict.startswith("timeout 0/"), judgement
    assert verifier.limits.state() == {}, "what is over its time is no correct answer to learn a limit from"


@pytest.mark.parametrize("form", FORMS)
async def test_code_reward_counted_time_stopping_the_program_beside_it_holds_a_place_no_longer_than_sleeping(
    boxes: CodeSandboxes, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "MIN_WALL_S", 1.0)
    began = time.monotonic()
    judgement = await _verifier(boxes).judge(rollout(_answer(STOP + "import time\ntime.sleep(1000)"), FORMS[form]))
    assert judgement.verdict.startswith("timeout 0/"), judgement
    assert time.monotonic() - began < 8.0


async def test_code_reward_counted_time_a_forged_report_of_time_teaches_the_limit_nothing(boxes: CodeSandboxes) -> None:
    end = {"status": 0, "signal": 0, "limit": None, "cpu_s": 1e6, "stderr": ""}
    answer = pack({"case": end}) + add_length(b"1\n")
    forge = f"""
import os
for name in os.listdir(f"/proc/{{os.getppid()}}/fd"):
    try:
        fd = os.open(f"/proc/{{os.getppid()}}/fd/{{name}}", os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, {answer!r})
    except OSError: pass
"""
    verifier = CodeVerifier(CodeReward(type="code", min_cpu_s=2.0, max_cpu_s=20.0), boxes)
    await verifier.judge(rollout(_answer(forge), FORMS["stdin"]))
    limits = verifier.limits
    assert all(limits.compute_cpu_limit_s("d/0", case) in (20.0, 2.0) for case in range(2)), limits.state()
    anchors = {int(entry[0]): entry[1] for entry in verifier.limits.state().get("d/0", [])}
    assert all(0 <= seconds < 10 for seconds in anchors.values()), anchors


async def test_code_reward_counted_time_each_case_is_charged_with_what_it_used(boxes: CodeSandboxes) -> None:
    verifier = CodeVerifier(CodeReward(type="code", min_cpu_s=0.1, max_cpu_s=5.0), boxes)
    code = "import time\nlimit = float(input())\nwhile time.process_time() < limit: pass\nprint(1)"
    tests = [{"stdin": "0", "stdout": "1"}, {"stdin": "0.4", "stdout": "1"}, {"stdin": "0", "stdout": "1"}]
    assert (await verifier.judge(rollout(f"```python\n{code}\n```", {"tests": tests}))).correct
    first, second, third = (entry[1] for entry in verifier.limits.state()["d/0"])
    assert 0.3 < second < 1.0 and first < 0.25 and third < 0.25


async def test_code_reward_counted_time_a_case_ended_from_outside_leaves_the_others_their_verdict(
    boxes: CodeSandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "MIN_WALL_S", 1.0)
    code = f"if input() == 'stop':\n    {STOP.strip().replace(chr(10), '; ')}\n    while True: pass\nprint(1)"
    tests = [{"stdin": "x", "stdout": "1"}, {"stdin": "stop", "stdout": "1"}, {"stdin": "x", "stdout": "1"}]
    verifier = CodeVerifier(
        CodeReward(type="code", min_cpu_s=0.2, max_cpu_s=0.5, wall_factor=2.0, credit="share"), boxes
    )
    judgement = await verifier.judge(rollout(f"```python\n{code}\n```", {"tests": tests}))
    assert (judgement.value, judgement.parts["timeout"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))


async def test_code_reward_counted_time_a_message_that_is_none_is_its_cases_failure_and_not_run_again(
    boxes: CodeSandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "MIN_WALL_S", 1.0)
    code = f"""
import os, signal
if input() == "forge":
    for name in os.listdir(f"/proc/{{os.getppid()}}/fd"):
        try:
            fd = os.open(f"/proc/{{os.getppid()}}/fd/{{name}}", os.O_WRONLY | os.O_NONBLOCK)
            os.write(fd, {add_length(b"no message") + add_length(b"")!r})
        except OSError: pass
    os.kill(os.getppid(), signal.SIGSTOP)
    while True: pass
print(1)
"""
    config = CodeReward(type="code", min_cpu_s=0.2, max_cpu_s=0.5, wall_factor=2.0, credit="share")
    tests = [{"stdin": word, "stdout": "1"} for word in ("forge", "x", "x")]
    began = time.monotonic()
    judgement = await CodeVerifier(config, boxes).judge(rollout(f"```python\n{code}\n```", {"tests": tests}))
    assert judgement.verdict == "exited 1/3", judgement  # the next case found the stopped program: it is the timeout
    assert [judgement.parts[f"case_{case}"] for case in range(3)] == [0.0, 0.0, 1.0]
    assert time.monotonic() - began < 8.0
