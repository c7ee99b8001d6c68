"""Records the experts that routers choose in vLLM's workers, and reads them per request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.errors import ModelError
from roll.inference.spec import EngineSpec
from roll.types import GenerationRequest

if TYPE_CHECKING:
    from vllm import RequestOutput

__all__ = ["ExpertReader"]


class ExpertReader:
    """Reads the experts that vLLM's workers recorded. On a CPU, ROLL records them; on an accelerator, vLLM does.

    Args:
        spec: The spec of the engine.
        call_workers: A function that calls a method of every worker and returns the replies.
        cpu: Whether vLLM computes on the CPU.
    """

    def __init__(self, spec: EngineSpec, call_workers: Callable[..., Awaitable[list[Any]]], *, cpu: bool) -> None:
        self._spec = spec
        self._call_workers = call_workers
        self._cpu = cpu
        self._routed_layers: list[int] = []
        """The indices of layers with routers."""

    async def start(self) -> None:
        """Make the workers record the chosen experts.

        Raises:
            ModelError: the model has no routers, or its routers do not report the chosen experts.
        """
        replies = await self._call_workers("roll_record_experts", self._spec.max_num_seqs, not self._cpu)
        errors = [reply["error"] for reply in replies if "error" in reply]
        if errors:
            raise ModelError(
                "training.router_replay 'engine' is not supported, because the vllm engine cannot record the experts "
                f"of '{self._spec.model_path}': {errors[0]}; set router_replay to none, or inference.engine to hf"
            )
        self._routed_layers = replies[0]["layers"]

    async def read(self, request: GenerationRequest, output: RequestOutput) -> Any:
        """Return the experts [n, layers, k] chosen for the first n tokens of a request; `None` if not recorded."""
        if self._cpu:
            if (found := (await self._call_workers("roll_pop_experts", request.request_id))[0]) is None:
                return None
            dtype, shape, data = found
            return np.frombuffer(data, dtype).reshape(shape)
        routed = output.outputs[0].routed_experts
        return None if routed is None else np.asarray(routed)[:, self._routed_layers].astype(np.int16)
