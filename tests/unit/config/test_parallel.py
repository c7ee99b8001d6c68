"""What `training.parallel` is refused with before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.load import load_config
from roll.config.parallel import ParallelConfig
from roll.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
STAGES = ["cluster.type=ray", "cluster.device_mapping.actor_train=0-3", "training.parallel.pp=4"]


def test_config_parallel_stages_and_what_divides_a_row_share_their_samples() -> None:
    parallel = ParallelConfig(pp=2, cp=3, tp=2, dp_replicate=5)
    assert (parallel.num_ranks, parallel.ranks_per_batch_shard, parallel.ranks_per_micro_batch) == (60, 12, 6)
    assert parallel.find_layout_problem(120) is None
    assert parallel.find_layout_problem(
        6
    ) == "the number of trainer ranks (6) must be divisible by training.parallel pp 2 x dp_replicate 5 x " + (
        "cp 3 x tp 2"
    )


def test_config_parallel_credit_by_attention_is_refused_with_stages() -> None:
    load_config(QUICKSTART, STAGES)
    with pytest.raises(ConfigError, match=r"algorithm.credit.type \w+ is not supported with pipeline parallelism"):
        load_config(QUICKSTART, [*STAGES, "algorithm.type=attention_credit"])


def test_config_parallel_parts_of_stages_are_refused_without_stages() -> None:
    load_config(QUICKSTART, [*STAGES, "training.parallel.vpp=2"])
    with pytest.raises(ConfigError, match=r"vpp 2 requires pp >= 2.* set training.parallel.pp to 2 or more"):
        load_config(QUICKSTART, ["training.parallel.vpp=2"])
    with pytest.raises(ConfigError, match=r"vpp.*1000"):  # of so many, each is listed before a layer is counted
        load_config(QUICKSTART, [*STAGES, "training.parallel.vpp=1000000000"])


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("megatron", "megatron back-end does not support dp_replicate and vpp"),
        ("deepspeed", "does not support training.parallel"),
    ],
)
def test_config_parallel_parts_of_stages_are_refused_by_other_back_ends(backend: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(QUICKSTART, [*STAGES, "training.parallel.vpp=2", f"training.backend={backend}"])
