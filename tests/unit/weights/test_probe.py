"""The probe's arithmetic on numbers made by hand; engines come in test_sync."""

import numpy as np
import pytest

from roll.types import TensorSpec
from roll.weights.probe import NOISE_BOUNDS, ProbeChecker, build_probe_batch, find_majority_dtype, get_noise_bounds

LENGTH = 101
"""Tokens, of which the first is not compared."""


def trainer_says(shift: float = 0.0) -> list[np.ndarray]:
    """Log-probs -3 + shift on every token but the first, in two sequences."""
    whole = np.full(LENGTH, -3.0 + shift)
    whole[0] = 0.0
    return [whole[:41], np.concatenate([[0.0], whole[41:]])]


def plus(logprobs: list[np.ndarray], amount: float, share: float = 1.0) -> list[np.ndarray]:
    """`amount` more on the first `share` of the compared tokens; nonsense on the others, which must not matter."""
    flat = np.concatenate([one[1:] for one in logprobs])
    flat[: round(share * len(flat))] += amount
    pieces = np.split(flat, np.cumsum([len(one) - 1 for one in logprobs])[:-1])
    return [np.concatenate([[123.0], piece]) for piece in pieces]


def test_weight_sync_probe_mean_and_largest_difference_leave_out_first_tokens():
    result = ProbeChecker(NOISE_BOUNDS["float32"]).check("e", plus(trainer_says(), 1e-3, share=0.25), trainer_says())
    assert result.mean_abs == pytest.approx(0.25e-3, rel=1e-6)
    assert result.max_abs == pytest.approx(1e-3, rel=1e-6)
    assert not result.problem


@pytest.mark.parametrize(("dtype", "first", "tolerated"), [
    ("float32", 1e-6, 3e-5),
    ("float32", 1e-4, 3e-4),
    ("bfloat16", 1e-3, 2e-2),
    ("bfloat16", 4e-2, 12e-2),
    ("bfloat16", 0.2, 0.3),
])  # fmt: skip
def test_weight_sync_probe_later_differences_may_be_three_times_the_first_within_floor_and_ceiling(
    dtype, first, tolerated
):
    checker = ProbeChecker(NOISE_BOUNDS[dtype])
    assert not checker.check("e", plus(trainer_says(), first), trainer_says()).problem
    assert not checker.check("a", plus(trainer_says(), 0.99 * tolerated), trainer_says()).problem
    result = checker.check("b", plus(trainer_says(), 1.01 * tolerated), trainer_says())
    assert result.tolerance == pytest.approx(tolerated)
    assert "differ from the trainer's" in result.problem


@pytest.mark.parametrize(("dtype", "ceiling"), [("float32", 1e-2), ("bfloat16", 0.3), ("int8", 0.5)])
def test_weight_sync_probe_the_first_difference_has_a_ceiling(dtype: str, ceiling: float):
    assert (
        not ProbeChecker(NOISE_BOUNDS[dtype]).check("e", plus(trainer_says(), 0.99 * ceiling), trainer_says()).problem
    )
    assert ProbeChecker(NOISE_BOUNDS[dtype]).check("e", plus(trainer_says(), 1.01 * ceiling), trainer_says()).problem


def test_weight_sync_probe_a_given_tolerance_replaces_all_of_that():
    checker = ProbeChecker(NOISE_BOUNDS["bfloat16"], tolerance=0.5)
    assert not checker.check("e", plus(trainer_says(), 0.49), trainer_says()).problem
    assert checker.check("e", plus(trainer_says(), 0.51), trainer_says()).problem


def test_weight_sync_probe_tolerance_grows_with_the_size_of_log_probs_but_not_with_their_shrinking():
    checker = ProbeChecker(NOISE_BOUNDS["bfloat16"])
    checker.check("e", plus(trainer_says(), 0.02), trainer_says())
    twice = checker.check("e", plus(trainer_says(-3.0), 0.1), trainer_says(-3.0))
    half = checker.check("e", plus(trainer_says(1.5), 0.05), trainer_says(1.5))
    assert twice.tolerance == pytest.approx(0.12)
    assert half.tolerance == pytest.approx(0.06)


def test_weight_sync_probe_log_probs_that_are_not_finite_are_a_problem():
    for value in (np.nan, -np.inf):
        result = ProbeChecker(NOISE_BOUNDS["bfloat16"]).check(
            "e", plus(trainer_says(), value, share=0.01), trainer_says()
        )
        assert result.problem == "log-probs are not finite"


def test_weight_sync_probe_engines_that_compute_in_8_bits_have_bounds_of_their_own():
    """Engines that only receive int8 weights differ by 0.09, and those that compute in int8 by up to 0.5."""
    assert get_noise_bounds("int8", computes_in_8_bits=False).ceiling == 0.5
    assert get_noise_bounds("int8", computes_in_8_bits=True).ceiling == 1.0
    assert get_noise_bounds("bfloat16", computes_in_8_bits=True) == NOISE_BOUNDS["bfloat16"]
    assert get_noise_bounds("float64", computes_in_8_bits=False) == NOISE_BOUNDS["bfloat16"]


@pytest.mark.parametrize("dtype", sorted(NOISE_BOUNDS))
def test_weight_sync_probe_an_engine_that_did_not_move_with_its_trainer_is_seen_at_any_precision(dtype: str):
    checker = ProbeChecker(NOISE_BOUNDS[dtype])
    engine = plus(trainer_says(), 1e-6)
    checker.check("e", engine, trainer_says())
    result = checker.check("e", engine, trainer_says(1e-5))
    assert "did not change although" in result.problem
    assert not checker.check("e", engine, trainer_says(1e-5), weights_changed=False).problem


def test_weight_sync_probe_beneath_a_smooth_difference_the_comparison_of_changes_sees_what_the_tolerance_hides():
    checker = ProbeChecker(NOISE_BOUNDS["float32"])
    offset = 5e-3
    checker.check("e", plus(trainer_says(), offset), trainer_says())
    healthy = checker.check("e", plus(trainer_says(0.01), offset + 1e-6), trainer_says(0.01))
    assert healthy.change == pytest.approx(0.01)
    assert healthy.change_missed == pytest.approx(1e-6, rel=1e-3)
    assert not healthy.problem
    stale = checker.check("e", plus(trainer_says(0.02), offset - 3e-4), trainer_says(0.02))
    assert stale.mean_abs < stale.tolerance / 2, "the plain comparison sees nothing"
    assert stale.change_missed == pytest.approx(3.01e-4, rel=1e-2)
    assert "changed differently" in stale.problem


def test_weight_sync_probe_a_larger_step_may_miss_proportionally_more():
    checker = ProbeChecker(NOISE_BOUNDS["float32"])
    checker.check("e", plus(trainer_says(), 5e-3), trainer_says())
    checker.check("e", plus(trainer_says(0.01), 5e-3 + 1e-4), trainer_says(0.01))
    result = checker.check("e", plus(trainer_says(0.11), 5e-3 + 1e-4 + 2.9e-3), trainer_says(0.11))
    assert result.change_tolerance == pytest.approx(3e-3)
    assert not result.problem


def test_weight_sync_probe_a_problem_does_not_become_the_measure():
    checker = ProbeChecker(NOISE_BOUNDS["float32"])
    assert checker.check("e", plus(trainer_says(), 1.0), trainer_says()).problem
    assert checker.check("e", plus(trainer_says(), 1.0), trainer_says()).problem


def test_weight_sync_probe_a_replaced_engine_is_not_compared_with_its_predecessor():
    checker = ProbeChecker(NOISE_BOUNDS["float32"])
    engine = plus(trainer_says(), 1e-6)
    checker.check("e", engine, trainer_says())
    checker.discard_logprobs("e")
    result = checker.check("e", engine, trainer_says(1e-5))
    assert not result.problem
    assert result.change == 0.0


def test_weight_sync_probe_the_majority_of_elements_decides_the_dtype():
    manifest = [
        TensorSpec(name="norm", shape=(10,), dtype="float32"),
        TensorSpec(name="weight", shape=(4, 4), dtype="bfloat16"),
    ]
    assert find_majority_dtype(manifest) == "bfloat16"
    assert find_majority_dtype(()) == "float32"


def test_weight_sync_probe_the_probe_batch_counts_every_token_but_the_first_in_groups_of_one():
    batch = build_probe_batch([np.array([5, 6, 7], dtype=np.int32), np.array([8, 9], dtype=np.int32)])
    assert batch.temperature == 1.0
    assert [s.loss_mask.tolist() for s in batch.samples] == [[False, True, True], [False, True]]
    assert len({s.unit for s in batch.samples}) == 2
    assert batch.num_loss_tokens == 3
