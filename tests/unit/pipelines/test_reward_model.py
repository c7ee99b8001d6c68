"""What a reward model learns by, and what `roll check` looks at, are what its configuration says."""

from __future__ import annotations

from typing import Any

import pytest

from roll.algorithms.losses import BradleyTerryLoss, RegressionLoss
from roll.config.pipelines.reward_model import RewardModelConfig
from roll.pipelines.reward_model import check
from roll.pipelines.reward_model.losses import build_loss


def config(**section: Any) -> RewardModelConfig:
    return RewardModelConfig.model_validate({
        "pipeline": "reward_model",
        "name": "run",
        "model": "m",
        "data": [{"source": "file", "path": "rows.jsonl"}],
        "reward_model": section,
    })  # fmt: skip


def test_reward_model_the_loss_is_the_configured_one() -> None:
    assert build_loss(config(centering=0.3).reward_model) == BradleyTerryLoss(centering=0.3)
    assert build_loss(config(loss="regression").reward_model) == RegressionLoss()


@pytest.mark.parametrize(("loss", "kind"), [("bradley_terry", "pair"), ("regression", "scored")])
def test_reward_model_the_check_reads_the_rows_that_training_reads(
    monkeypatch: pytest.MonkeyPatch, loss: str, kind: str
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(check, "inspect_examples", lambda config, **settings: seen.update(settings))
    check.inspect(config(loss=loss))
    assert (seen["kind"], seen["role"]) == (kind, "reward_model")
    assert seen["loss"] == f"roll.pipelines.reward_model.losses:{loss.upper()}"
