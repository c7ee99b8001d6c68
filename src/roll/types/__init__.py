"""The data types of ROLL: every record that is passed between packages or processes.

Records are frozen and keyword-only. Arrays are NumPy, one entry per token, aligned with `token_ids`; shapes use

    P  prompt tokens          T  generated tokens of one rollout        L = P + T  tokens of a training sample

A prompt is *drawn* (`PromptDraw`, with an id that the data ledger tracks), attempted `group_size` times (`Rollout`s of
one `Group`), and each scored rollout becomes a `TrainingSample`. Records do not contain control flags.
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
