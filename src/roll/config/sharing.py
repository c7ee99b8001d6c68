"""Checks whether engines and trainers can share devices as configured by `cluster.sharing`."""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["SharingRule", "find_sharing_problem"]

SharingRule: TypeAlias = Literal["disaggregated", "colocated", "partial_overlap", "elastic_overlap", "stream_training"]
"""When engines release devices that they share with trainers."""


def find_sharing_problem(rule: SharingRule, *, async_ratio: float, num_engines: int, num_shared: int) -> str:
    """Return the reason why a run cannot use a sharing rule, and a remedy; empty if it can.

    Args:
        rule: The rule.
        async_ratio: Async ratio of the run.
        num_engines: Number of engines.
        num_shared: Number of engines that share devices with trainers.
    """
    key = f"cluster.sharing {rule}"
    if rule in ("disaggregated", "colocated"):
        return ""
    if num_shared == num_engines:
        return (
            f"{key} requires engines that continue to generate while trainers compute, but every engine "
            "shares devices with trainers: map actor_train to fewer devices or actor_infer to more "
            "(cluster.device_mapping), or set sharing to colocated"
        )
    if rule == "stream_training" and async_ratio > 0:
        return (
            f"{key} requires rollout.scheduling.async_ratio 0, got {async_ratio:g}: set sharing to elastic_overlap, "
            "or async_ratio to 0"
        )
    if rule != "stream_training" and async_ratio == 0:
        return (
            f"{key} requires rollout.scheduling.async_ratio > 0, got 0: set sharing to stream_training, which trains "
            "finished groups while the others are generated, or async_ratio to 1"
        )
    return ""
