"""The run's judge as a role: separate engines with frozen weights, behind one proxy.

    reward ──► JudgeRole.generate ──► LLMProxy ──► judge-0, judge-1, …
                     └─ an engine has failed, and is not being replaced: start a replacement

Invariants:
    - every failure is an `InfraError`, including an engine that cannot be restarted: the rollout is retried, then
      marked, and the next request tries to start the engine once more;
    - the request of a canceled caller is aborted;
    - a timeout starts when an engine begins the request, so time in the queue is excluded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.cluster.base import Cluster
from roll.config.rollout_run import RolloutRunConfig
from roll.config.run import RunConfig
from roll.errors import ConfigError, InfraError, RewardInfraError, UserError, one_line_error
from roll.inference import get_engine_capabilities
from roll.models import find_stop_token_ids, load_tokenizer, resolve_model
from roll.pipelines.judge.specs import build_judge_specs, resolve_judge_kind
from roll.pipelines.quantization import check_judge_quantization
from roll.protocols import WorkerPool
from roll.rewards.compose import WeightedReward
from roll.rewards.judge.engine_judge import JudgeModel
from roll.rewards.opening import open_rewards
from roll.rewards.reply_cache import compute_content_key
from roll.rollout import LLMProxy, Router
from roll.rollout.engine_group import EngineGroup
from roll.running import run_in_thread
from roll.tracking import RunDirectory
from roll.tracking.rollout_trace import RequestTrace
from roll.types import Generation, GenerationRequest

__all__ = ["JudgeRole", "start_judge", "start_scoring"]


@dataclass(slots=True)
class _RequestCounters:
    """Counts since the last call to `JudgeRole.collect_metrics`."""

    num_requests: int = 0
    num_tokens: int = 0
    num_failed: int = 0
    waited_s: float = 0.0


class JudgeRole:
    """Runs the judge's engines, which generate verdicts for rewards, and collects the engines' metrics.

    Args:
        engines: Engines of the judge, which `close` shuts down.
        build_model: Builds the judge model from a function that generates with the engines.
        emit: Receives trace events.
    """

    def __init__(
        self,
        engines: EngineGroup,
        build_model: Callable[[Callable[..., Any]], JudgeModel],
        emit: Callable[..., None] = lambda **fields: None,
    ) -> None:
        self._engines = engines
        self._router = Router()
        self._proxy = LLMProxy(engines, router=self._router)
        self._trace = RequestTrace(emit)
        self._figures = _RequestCounters()
        self.model = build_model(self.generate)

    async def generate(self, request: GenerationRequest, time_limit_s: float) -> Generation:
        """Run a request on the judge's least loaded engine.

        Raises:
            InfraError: No engine answered.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._figures.num_requests += 1
        try:
            async with asyncio.timeout(None) as limit:

                def on_start(engine_id: str) -> None:
                    limit.reschedule(loop.time() + time_limit_s)
                    self._trace.begin(request.request_id, engine_id)

                self._restart_engines()
                generation = await self._proxy.generate(request, on_start=on_start)
        except TimeoutError:
            self._figures.num_failed += 1
            raise RewardInfraError(f"the judge '{self.model.name}' did not respond within {time_limit_s:g} s") from None
        except Exception as error:  # engines that cannot be restarted may raise any vendor's error
            self._figures.num_failed += 1
            if isinstance(error, InfraError):
                raise
            raise RewardInfraError(
                f"the judge '{self.model.name}' cannot be restarted: {one_line_error(error)}"
            ) from error
        finally:
            self._trace.end(request.request_id)
        self._figures.waited_s += loop.time() - began
        self._figures.num_tokens += len(generation.token_ids)
        return generation

    def _restart_engines(self) -> None:
        """Replace every engine that is not serving, including engines that the fleet no longer restarts."""
        serving = {id(engine) for engine in self._router.serving_engines}
        for engine in self._engines.list_awake():
            if id(engine) not in serving:
                self._proxy.replace(engine)

    def collect_metrics(self) -> dict[str, float]:
        """Return the judge's metrics.

        Metrics of the step: verdicts requested and cached, requests, tokens, failures, seconds per request. Metrics of
        the whole run: replaced engines and reissued requests."""
        figures, self._figures = self._figures, _RequestCounters()
        usage = self.model.usage
        answered = figures.num_requests - figures.num_failed
        metrics = {
            "judge/verdicts": float(usage.num_verdicts),
            "judge/kept": float(usage.num_cached),
            "judge/requests": float(figures.num_requests),
            "judge/tokens": float(figures.num_tokens),
            "judge/failures": float(figures.num_failed),
            "judge/replaced": float(self._proxy.num_replaced),
            "judge/reissued": float(self._proxy.num_reissued),
            "time/judge_request_s": figures.waited_s / answered if answered > 0 else 0.0,
        }
        usage.num_verdicts = usage.num_cached = 0
        return metrics

    async def close(self) -> None:
        """Shut every engine down."""
        await self._proxy.close()
        await self._engines.close()


async def start_judge(
    config: RolloutRunConfig,
    cluster: Cluster,
    run: RunDirectory | None = None,
    emit: Callable[..., None] = lambda **fields: None,
) -> JudgeRole:
    """Start the judge's engines.

    Raises:
        UserError: The judge's model cannot be used.
    """
    judge = config.judge
    assert judge is not None
    capabilities = get_engine_capabilities(resolve_judge_kind(config))
    path = await run_in_thread(resolve_model, judge.model, allow_quantized=capabilities.quantization)
    check_judge_quantization(judge, path)
    tokenizer = await run_in_thread(load_tokenizer, path, trust_remote_code=judge.trust_remote_code)
    specs = build_judge_specs(config, path, run)

    def build_model(generate: Callable[..., Any]) -> JudgeModel:
        return JudgeModel(
            name=judge.model,
            identity=_build_weights_key(path, judge.dtype, judge.quantization),
            tokenizer=tokenizer,
            stop_token_ids=find_stop_token_ids(path, tokenizer),
            max_context=specs[0].max_context,
            generate=generate,
        )

    try:
        engines = await cluster.start_engines(specs, "judge")
    except UserError as error:
        raise type(error)(f"the judge: {str(error).replace('inference.', 'judge.')}") from error
    try:
        return JudgeRole(engines, build_model, emit)
    except BaseException:
        await engines.close()
        raise


@asynccontextmanager
async def start_scoring(
    config: RunConfig, cluster: Cluster, pool: WorkerPool
) -> AsyncIterator[Mapping[str, WeightedReward]]:
    """Open a configuration's rewards outside a run, with the judge if it has one; yield the rewards by domain."""
    async with AsyncExitStack() as stack:
        judge = None
        if not isinstance(config, RolloutRunConfig):
            raise ConfigError(f"'{config.name}' runs the pipeline {config.pipeline}, which does not score answers.")
        if config.judge is not None:
            role = await start_judge(config, cluster)
            stack.push_async_callback(role.close)
            judge = role.model
        yield await stack.enter_async_context(open_rewards(config.data, config.sandbox, pool, judge))


def _build_weights_key(path: Path, dtype: str, quantization: str) -> str:
    """Return a key that identifies the weights in `path`: a digest of dtype, quantization, file names, sizes and
    modification times.

    Hashing the files' contents would take longer than loading them.
    """
    files = sorted(file for file in path.iterdir() if file.is_file())
    form = dtype if quantization == "none" else f"{dtype} {quantization}"
    return compute_content_key(form, [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files])
