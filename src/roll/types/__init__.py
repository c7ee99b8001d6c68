"""The data types of ROLL: all records that packages or processes exchange.

Records are frozen and keyword-only. Arrays are NumPy, one entry per token, aligned with `token_ids`; shapes use

    P  prompt tokens          T  generated tokens of one rollout        L = P + T  tokens of a training sample

A prompt is *drawn* (`PromptDraw`, with an ID that the data ledger tracks) and attempted `group_size` times (the
`Rollout`s of one `Group`). Each scored rollout becomes a `TrainingSample`.
"""

from roll.types.arrays import *  # noqa: F403
from roll.types.engines import *  # noqa: F403
from roll.types.examples import *  # noqa: F403
from roll.types.generation import *  # noqa: F403
from roll.types.losses import *  # noqa: F403
from roll.types.media import *  # noqa: F403
from roll.types.messages import *  # noqa: F403
from roll.types.rollouts import *  # noqa: F403
from roll.types.training import *  # noqa: F403
