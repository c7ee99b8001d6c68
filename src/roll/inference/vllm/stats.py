"""Collects the step statistics of vLLM's scheduler."""

from __future__ import annotations

from typing import Any

from roll.inference.step_log import StepLog

__all__ = ["StatsCollector"]


class StatsCollector:
    """Collects the latest statistics of vLLM's scheduler, which updates them after every step."""

    def __init__(self) -> None:
        self.num_running = 0
        self.num_steps = 0
        self.num_preempted = 0
        self.kv_used = 0.0
        self.kv_capacity: int | None = None
        self.steps = StepLog()

    def build_logger_class(self) -> type:
        """Return a vLLM stat logger class that writes to this object."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        stats = self

        class Recorder(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                self._cache = vllm_config.cache_config

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                stats.num_steps += scheduler_stats is not None or iteration_stats is not None
                capacity = (self._cache.num_gpu_blocks or 0) * self._cache.block_size
                stats.kv_capacity = capacity or None
                if scheduler_stats is not None:
                    stats.num_running = scheduler_stats.num_running_reqs
                    stats.kv_used = scheduler_stats.kv_cache_usage
                if iteration_stats is not None:
                    stats.num_preempted += iteration_stats.num_preempted_reqs
                    num_started = len(iteration_stats.time_to_first_tokens_iter)
                    stats.steps.record_step(
                        num_decoding=iteration_stats.num_generation_tokens - num_started,
                        num_started=num_started,
                        num_prefilled=iteration_stats.prompt_token_stats.computed,
                        context_tokens=stats.kv_used * capacity,
                    )

            def log_engine_initialized(self) -> None:
                """Do nothing."""

        return Recorder
