"""What a dry run says of stages."""

from __future__ import annotations

from roll.config.parallel import ParallelConfig
from roll.preflight.layout import _idle, _in_words


def test_preflight_layout_it_is_said_which_layers_a_stage_has() -> None:
    found = {"between": 2**30, "gradients": 2**29, "peak": 2**31, "traffic": [], "layers": [(0, 8), (18, 18)]}
    assert list(_in_words(found, 1)) == [
        "a rank of stage 1, with layers 0 to 8 and 18, holds 1.00 GiB between steps, 0.50 GiB of gradients, and at "
        "most 2.00 GiB"
    ]


def test_preflight_layout_it_is_said_how_long_stages_wait_for_each_other() -> None:
    """3 / (8 + 3) and 3 / (32 + 3); with two parts each, 3 / (2 x 8 + 3) and 3 / (2 x 32 + 3)."""
    said = "of a step of 8 micro-batches on each data share, and"
    assert _idle(ParallelConfig(pp=4)) == f"stages wait for each other 27.3% {said} 8.6% of one of 32"
    assert _idle(ParallelConfig(pp=4, vpp=2)) == (
        f"stages of 2 parts each wait for each other 15.8% {said} 4.5% of one of 32"
    )
