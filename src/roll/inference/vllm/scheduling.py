"""A workaround for images in vLLM's scheduler. Imported only by vLLM, in the process of its scheduler.

vLLM 0.32 does not send a worker the pixels of an image whose keys and values are in the prefix cache, as for all but
the first rollout of a group. After a weight sync, both caches are empty, so the worker must encode the image again, and
vLLM's process ends with "Encoder cache miss". The same happens if a request is preempted and its image is no longer in
the encoder cache. With this patch, workers receive the pixels of all images. vLLM's newer model runner (V2), which
needs Triton, receives the whole request again when it resumes. Remove this module when the older runner does the same.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SCHEDULER_PATH", "build_scheduler"]

SCHEDULER_PATH = f"{__name__}.build_scheduler"
"""Name of `build_scheduler` for vLLM's argument `scheduler_cls`."""


def build_scheduler(*, vllm_config: Any, **options: Any) -> Any:
    """Return vLLM's default scheduler, patched to send workers the pixels of all images.

    Args:
        vllm_config: The configuration of vLLM.
        options: The other arguments of a scheduler.
    """
    from vllm.v1.core.sched import output
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    if not vllm_config.use_v2_model_runner:
        output.strip_covered_mm_data = _keep_pixels
    chosen = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return chosen(vllm_config=vllm_config, **options)


def _keep_pixels(mm_features: list[Any], *_: Any, **__: Any) -> list[Any]:
    return mm_features
