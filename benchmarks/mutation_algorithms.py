"""Does a bug in the numbers show? Plants one at a time in a copy of the package, and runs the tests that must fail.

    make mutation NAME=algorithms                 # every planted bug must be caught; says by which test
    make mutation NAME=algorithms ARGS="3 17"     # only these
    make mutation NAME=algorithms ARGS=kl         # only those whose description or file has this text

A row of `BUGS` is a description, a file below `src/roll`, a text that occurs in it once, what replaces it, and the
tests that are run. A bug counts as caught when one of them fails. Before any bug is planted, all tests of the chosen
rows must pass.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "roll"
TIME_LIMIT_S = 600


class Bug(NamedTuple):
    """One edit of one file, and the tests that must notice it."""

    what: str
    file: str
    """Below `src/roll`."""
    old: str
    new: str
    tests: str
    """Paths below `tests/unit`, separated by blanks, each perhaps with `::name` behind."""


BUGS = (
    Bug(
        "a cut-off answer is well formed",
        "algorithms/rewards.py",
        'well_formed=rollout.is_finished and reward.verdict != "no answer"',
        'well_formed=reward.verdict != "no answer"',
        "pipelines/test_learning.py",
    ),
    Bug(
        "imitation without discount for anchor_state",
        "algorithms/token_weights.py",
        'settings.gamma if settings.estimator in ("turn", "anchor_state") else 1.0',
        'settings.gamma if settings.estimator in ("turn",) else 1.0',
        "pipelines/test_demonstrations.py",
    ),
    Bug(
        "top_variance by the trained reward",
        "algorithms/selection.py",
        "np.std([s.filter_value for s in shaped[draw_id]])",
        "np.std([s.training_reward for s in shaped[draw_id]])",
        "pipelines/test_learning.py",
    ),
    Bug(
        "difficulty weight without a clip",
        "algorithms/token_weights.py",
        "1.0 - np.clip(solved, 0.0, 1.0)",
        "1.0 - solved",
        "pipelines/test_learning.py",
    ),
    Bug(
        "a teacher's limit cut before the coefficient",
        "algorithms/teacher_advantages.py",
        "advantages = np.where(loss_mask, coefficient * (teacher_logprobs - logprobs), 0.0)\n"
        "    return (advantages if limit is None else advantages.clip(-limit, limit)).astype(np.float32)",
        "advantages = np.where(loss_mask, teacher_logprobs - logprobs, 0.0)\n"
        "    cut = advantages if limit is None else advantages.clip(-limit, limit)\n"
        "    return (coefficient * cut).astype(np.float32)",
        "algorithms/test_distillation_losses.py",
    ),
    Bug(
        "min_difference excludes what differs by exactly as much",
        "algorithms/answer_selection.py",
        "rewards[b] - rewards[w] >= min_difference]",
        "rewards[b] - rewards[w] > min_difference]",
        "algorithms/test_answer_selection.py",
    ),
    Bug(
        "pairs of equal rewards",
        "algorithms/answer_selection.py",
        "if rewards[b] > rewards[w] and rewards[b]",
        "if rewards[b] >= rewards[w] and rewards[b]",
        "algorithms/test_answer_selection.py",
    ),
    Bug(
        "KL of a step of demonstrations alone",
        "pipelines/learning/updates.py",
        "return float(np.concatenate(counted).mean()) if counted else None",
        "return float(np.concatenate(counted).mean())",
        "pipelines/test_kl_of_demonstrations.py",
    ),
    Bug(
        "KL in the reward counts demonstrations",
        "pipelines/learning/updates.py",
        "own = [s for s in results.batch.samples if not s.expert and s.loss_mask.any()]",
        "own = [s for s in results.batch.samples if s.loss_mask.any()]",
        "pipelines/test_kl_of_demonstrations.py",
    ),
    Bug(
        "KL in the loss counts demonstrations as 0",
        "algorithms/losses/policy.py",
        'metrics["policy/kl_reference"] = own.sum() / inputs.num_own_tokens',
        'metrics["policy/kl_reference"] = own.sum() / inputs.num_tokens',
        "algorithms/test_loss_parts.py",
    ),
    Bug(
        "mismatch counts demonstrations as 0",
        "algorithms/losses/policy.py",
        "(own * value).sum() / inputs.num_own_tokens",
        "(own * value).sum() / inputs.num_tokens",
        "algorithms/test_loss_parts.py",
    ),
    Bug(
        "rounding is a deviation",
        "algorithms/normalization.py",
        "spread + epsilon if spread > ROUNDING_TOLERANCE * size else 1.0",
        "spread + epsilon if spread else 1.0",
        "algorithms/test_advantages.py",
    ),
    Bug(
        "a teacher's rewards under truncated sampling",
        "config/truncation.py",
        'if not setting or distillation.mode != "reward":',
        "if True:",
        "config/test_algorithm.py",
    ),
    Bug(
        "the reference's choices of experts count as the policy's",
        "training/network/routing.py",
        "if is_recomputing() or not self._counts_choices:",
        "if recomputing():",
        "training/test_routing.py",
    ),
    Bug(
        "a group does not agree on replayed experts",
        "training/packing/micro_batches.py",
        "        units = [unify_replayed_experts(members) for members in units]",
        "        units = list(units)",
        "training/test_routing.py",
    ),
    Bug(
        "engine log-probs that are not finite",
        "types/generation.py",
        "        wrong = np.flatnonzero(~np.isfinite(self.logprobs))\n        if len(wrong):",
        "        wrong = np.flatnonzero(~np.isfinite(self.logprobs))\n        if False:",
        "inference/test_vllm_parts.py rollout/test_retries.py",
    ),
    Bug(
        "a router counts requests, not shares of slots",
        "rollout/routing.py",
        "self.curve.compute_token_s(num_requests / self.limit)",
        "self.curve.compute_token_s(num_requests)",
        "rollout/test_proxy.py",
    ),
    Bug(
        "a correction for mismatch holds staleness",
        "algorithms/correction.py",
        '"mismatch": ("behavior", "rollout")',
        '"mismatch": ("old", "rollout")',
        "algorithms/test_loss_parts.py",
    ),
    Bug(
        "a stale token is scored by the oldest snapshot",
        "pipelines/snapshots.py",
        '(await self._policy.forward(part, ["logprobs"], ForwardOptions(version=each)))',
        '(await self._policy.forward(part, ["logprobs"], ForwardOptions(version=self.versions[0])))',
        "pipelines/test_snapshots.py",
    ),
    Bug(
        "a snapshot is kept one step too short",
        "pipelines/snapshots.py",
        "if version - self._num < v <= version",
        "if version - self._num + 1 < v <= version",
        "pipelines/test_snapshots.py",
    ),
    Bug(
        "a tie of a pair is wrong",
        "algorithms/pairs.py",
        "return 0.5 * (difference.sign() + 1.0)",
        "return (difference > 0).to(difference.dtype)",
        "algorithms/test_pair_losses.py",
    ),
    Bug(
        "an accuracy of few without its interval",
        "tracking/intervals.py",
        "    if 0 < num_trials < MIN_NUM_TRIALS:",
        "    if False:",
        "tracking/test_intervals.py pipelines/test_preference.py",
    ),
    Bug(
        "the weights of a snapshot stay",
        "training/memory/snapshots.py",
        "        finally:\n            self._write(current)",
        "        finally:\n            pass",
        "training/test_snapshots.py",
    ),
    Bug(
        "the template's marks alone say what is trained",
        "data/turns.py",
        "mask &= _mark_spans(starts, generated_spans)",
        "mask = _mark_spans(starts, generated_spans)",
        "data/test_training_templates.py",
    ),
    Bug(
        "an earlier turn that is rendered differently is trained",
        "data/turns.py",
        "return (begin, start) if same else None",
        "return begin, start",
        "data/test_conversation.py data/test_training_templates.py",
    ),
    Bug(
        "the first token of a text twice",
        "data/bos.py",
        "return list(ids[1:] if doubled else ids)",
        "return list(ids)",
        "data/conversations/test_beginning_of_text.py",
    ),
    Bug(
        "a thought is scored",
        "rewards/reasoning.py",
        "final = extract_answer(rollout.text) if rollout.final_text is None else rollout.final_text",
        "final = rollout.text",
        "rewards/test_reasoning.py",
    ),
    Bug(
        "a thought that the prompt began and that never ends is an answer",
        "data/reasoning.py",
        "if closed[0] < 0 and begun:",
        "if False:",
        "data/test_reasoning.py",
    ),
    Bug(
        "a text that says nothing is the same as another",
        "rewards/mathematics/same_text.py",
        'return plain if re.search(r"\\w|\\\\[a-z]|[^\\x00-\\x7f]", plain) else ""',
        'return plain or "nothing"',
        "rewards/test_math_references.py",
    ),
    Bug(
        "a reference is not looked for in its solution",
        "rewards/math.py",
        "add_box_braces(text), extract_reference(reference)",
        "add_box_braces(text), reference",
        "rewards/test_math_references.py",
    ),
    Bug(
        "units of other dimensions are equal",
        "rewards/mathematics/units.py",
        " if answer_unit.dimension == reference_unit.dimension else None",
        "",
        "rewards/test_math_references.py",
    ),
    Bug(
        "a verl-style function is bound by place",
        "rewards/signatures.py",
        "        name not in (*ROLL_PARAMETERS, *VERL_PARAMETERS) or name == ROLL_PARAMETERS[place]\n",
        "        True\n",
        "rewards/test_signatures.py",
    ),
    Bug(
        "a judge's score that was cut off counts",
        "rewards/judge/replies.py",
        "if depth and _OBJECT_START_PATTERN.match(text, begin):",
        "if False:",
        "rewards/test_judge.py",
    ),
    Bug(
        "demonstrations move the coefficient of the KL penalty",
        "pipelines/learning/updates.py",
        "num_rollouts = sum(not samples[places[0]].expert for places in results.batch.sequences)",
        "num_rollouts = len(results.batch.sequences)",
        "pipelines/test_kl_of_demonstrations.py",
    ),
    Bug(
        "staleness that is not known counts as none",
        "pipelines/snapshots.py",
        "if (stale & known).any() or not stale.any():",
        "if True:",
        "pipelines/test_snapshots.py",
    ),
    Bug(
        "a router's session stays at an engine that is busier for its slots",
        "rollout/routing.py",
        "if entry.compute_load(entry.num_requests - spared) > least.load:",
        "if entry.num_requests - spared > least.num_requests:",
        "rollout/test_proxy.py",
    ),
    Bug(
        "a busy engine is measured as a slow one",
        "rollout/pace.py",
        "return each.tokens * fleet.idle_s + each.token_use * fleet.slope_s",
        "return each.tokens * fleet.idle_s",
        "rollout/test_pace.py",
    ),
    Bug(
        "old answers of an engine count as much as new ones",
        "rollout/pace.py",
        "self._weight *= 2.0 ** (1 / (HALF_LIFE * len(self._sums)))",
        "pass",
        "rollout/test_pace.py",
    ),
    Bug(
        "pauses of an engine count as its time for an answer",
        "rollout/pace.py",
        "if not paused and self._last is not None:",
        "if self._last is not None:",
        "rollout/test_pace.py",
    ),
    Bug(
        "tied weights that differ become one",
        "models/loading.py",
        "if a.shape != b.shape or not torch.equal(a, b):",
        "if a.shape != b.shape:",
        "models/test_directory.py::test_model_directory_model_weights_that_are_tied_are_compared_again_once_they_are_loaded",
    ),
    Bug(
        "an answer of a pair that is marked as context is judged",
        "data/examples/reader.py",
        "any(\n        place >= conversation.num_prompt_messages for place in conversation.untrained_messages\n    ):",
        "False:",
        "data/conversations/test_row_forms.py",
    ),
    Bug(
        "one token makes a divergence infinite",
        "pipelines/snapshots.py",
        "np.clip(log_ratios, -20.0, 20.0)",
        "log_ratios",
        "pipelines/test_snapshots.py",
    ),
    Bug(
        "a router gives up where the least loaded engines have full caches",
        "rollout/routing.py",
        "if found and found[0].load[0] == FULL:",
        "if found:",
        "rollout/test_proxy.py",
    ),
)


def chosen(arguments: Sequence[str]) -> list[tuple[int, Bug]]:
    """Return the bugs that the command line names, with their numbers; all where it names none."""
    rows = list(enumerate(BUGS, 1))
    if not arguments:
        return rows
    return [
        (n, bug)
        for n, bug in rows
        if any(a == str(n) or (not a.isdigit() and a in f"{bug.what} {bug.file}") for a in arguments)
    ]


def run_tests(package: Path, tests: str) -> str:
    """Run tests on a copy of the package; return the first that fails, empty where all pass."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    paths = [str(ROOT / "tests" / "unit" / test) for test in tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no end within {TIME_LIMIT_S} s"
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (?:\S*/)?(\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed[1] if failed else (done.stderr or done.stdout).strip().splitlines()[-1]


def plant(package: Path, bug: Bug) -> None:
    """Write a bug into the copy.

    Raises:
        SystemExit: its place is not there once.
    """
    text = (SOURCE / bug.file).read_text()
    if text.count(bug.old) != 1:
        raise SystemExit(f"'{bug.what}': its place in {bug.file} is found {text.count(bug.old)} times, not once")
    (package / bug.file).write_text(text.replace(bug.old, bug.new))


def main() -> None:
    """Plant every chosen bug; fail if one is not caught."""
    rows = chosen(sys.argv[1:])
    if not rows:
        raise SystemExit(f"no bug has a number or text of {sys.argv[1:]}: there are {len(BUGS)}")
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "roll"
        shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
        tests = " ".join(dict.fromkeys(test for _, bug in rows for test in bug.tests.split()))
        if broken := run_tests(package, tests):
            raise SystemExit(f"without any bug, this fails: {broken}")
        missed = 0
        for number, bug in rows:
            plant(package, bug)
            how = run_tests(package, bug.tests)
            shutil.copy(SOURCE / bug.file, package / bug.file)
            missed += not how
            print(f"{number:2d}/{len(BUGS)} {'caught' if how else 'MISSED'}  {bug.what}  [{how[:110]}]", flush=True)
    print(f"{len(rows) - missed} of {len(rows)} planted bugs are caught")
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
