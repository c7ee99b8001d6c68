"""What a dry run says of stages."""

from __future__ import annotations

from roll.config.parallel import ParallelConfig
from roll.preflight.layout import _format_bubble, _format_layout


def test_preflight_layout_it_is_said_which_layers_a_stage_has() -> None:
    found = {"between": 2**30, "gradients": 2**29, "peak": 2**31, "traffic": [], "layers": [(0, 8), (18, 18)]}
    assert list(_format_layout(found, 1)) == [
        "a rank of stage 1 (layers 0 to 8 and 18) uses 1.00 GiB between steps, plus 0.50 GiB of gradients; the peak is "
        "2.00 GiB"
    ]


def test_preflight_layout_it_is_said_how_long_stages_wait_for_each_other() -> None:
    """3 / (8 + 3) and 3 / (32 + 3); with two parts each, 3 / (2 x 8 + 3) and 3 / (2 x 32 + 3)."""
    said = "of a step with 8 micro-batches per data rank, and"
    assert _format_bubble(ParallelConfig(pp=4)) == (f"the pipeline bubble of the stages is 27.3% {said} 8.6% with 32")
    assert _format_bubble(ParallelConfig(pp=4, vpp=2)) == (
        f"the pipeline bubble of the stages with 2 model chunks each is 15.8% {said} 4.5% with 32"
    )
