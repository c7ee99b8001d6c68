"""A vLLM worker with a planted bug: it confirms the weights of version 2, and keeps on computing with version 1."""

from __future__ import annotations

import pickle
from typing import Any

from roll.inference.vllm.worker import WeightReceiver
from roll.weights import open_update


class StaleReceiver(WeightReceiver):
    """Receives version 2 without loading it."""

    def roll_update_weights(self, payload: bytes) -> dict[str, Any]:
        update, _ = pickle.loads(payload)
        if update.policy_version != 2:
            return super().roll_update_weights(payload)
        with open_update(update) as receiver:
            for _ in receiver:
                pass
        return {"checksums": receiver.checksums}
