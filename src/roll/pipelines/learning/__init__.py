"""What every pipeline does between scored rollouts and new weights."""

from roll.pipelines.learning.losses import policy_loss, value_loss
from roll.pipelines.learning.selection import Selection, episode_of, select, settle
from roll.pipelines.learning.weighing import kl_token_rewards, weigh

__all__ = ["Selection", "episode_of", "kl_token_rewards", "policy_loss", "select", "settle", "value_loss", "weigh"]
