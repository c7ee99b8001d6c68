"""AsyPPO: asymmetric PPO with mini-critics (arXiv 2510.01656).

    M = 2 critics, each trained on its own half of every group's rollouts;   V = their mean;   sigma_t = their deviation
    sigma_t in the lowest 20 %: A_t = 0;   in the highest 20 %: no entropy bonus;   else PPO with an entropy bonus

Critics may be smaller than the policy (`critic.model`). Constants that the paper leaves open: GAE lambda 1 as in `ppo`,
entropy coefficient 0.001, small enough that short answers keep ending.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PRESET"]

PRESET: dict[str, Any] = {
    "advantage": {"estimator": "gae", "mean": "none", "std": "none", "gae_lambda": 1.0, "whiten": "token"},
    "critic": {"num_critics": 2, "drop_agreed": 0.2, "value_clip": 0.5},
    "entropy": {"coefficient": 0.001, "drop_divergent": 0.2},
    "filters": {"skip_zero_variance": False},
}
