"""Transfers the trainer's weights to engines: stage, prefetch if the transport supports it, pause, deliver."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from roll.errors import EngineDiedError, WeightSyncError
from roll.protocols import InferenceEngine, TrainerGroup
from roll.types import WeightStore, WeightUpdate
from roll.weights.delivery import Delivery

__all__ = ["transfer_weights"]


async def transfer_weights(
    trainer: TrainerGroup,
    engines: Sequence[InferenceEngine],
    delivery: Delivery,
    transport: str,
    store: WeightStore | None,
    pause: Callable[[], Awaitable[None]],
) -> tuple[Delivery, Mapping[str, int], dict[str, EngineDiedError]]:
    """Send the weights to all engines that are alive. A broadcast is repeated without the engines that died in it.

    Args:
        trainer: The trainer.
        engines: The engines.
        delivery: The delivery of the first attempt.
        transport: The name of the transport.
        store: The file store of the transport `store`.
        pause: A function that pauses the engines. With the transport `store`, it is called after the engines have
            fetched the weights; otherwise, before the weights are staged.

    Returns:
        The last delivery, the checksums that were sent, and the engines that died.

    Raises:
        WeightSyncError: an engine failed, or the weights cannot be sent.
    """
    dead: dict[str, EngineDiedError] = {}
    left = list(engines)
    if store is None:
        await pause()

    async def deliver(engines: Sequence[InferenceEngine], update: WeightUpdate, delivery: Delivery) -> None:
        if store is not None:
            engines = await delivery.prefetch(engines, update)
            await pause()
        await delivery.deliver(engines, update)

    while left:  # without engines, for example while all sleep, a broadcast would wait forever
        failure: WeightSyncError | None = None
        sent: Mapping[str, int] = {}
        # Only trainers that support the transport `store` need to have the argument.
        options = {} if store is None else {"store": replace(store, adapter=delivery.adapter)}
        try:
            sent = await trainer.send_weights(
                delivery.policy_version,
                transport,
                lambda update, to=delivery, some=tuple(left): deliver(some, update, to),
                **options,
            )
        except WeightSyncError as error:
            failure = error
        finally:
            await delivery.end()
        dead |= delivery.dead_engines
        if failure is None and not delivery.errors:
            return delivery, sent, dead
        if not delivery.dead_engines or transport != "broadcast":
            raise _combine_errors(delivery.policy_version, failure, delivery.errors)
        left = [engine for engine in left if engine.engine_id not in dead]
        delivery = delivery.copy_settings()
    return delivery, {}, dead


def _combine_errors(version: int, failure: WeightSyncError | None, errors: Mapping[str, Exception]) -> Exception:
    """Combine the errors of the engines into one; return `failure` if there are none."""
    if not errors:
        assert failure is not None, "no error to report"
        return failure
    details = "; ".join(
        f"engine '{engine_id}': {str(error) or type(error).__name__}" for engine_id, error in errors.items()
    )
    combined = WeightSyncError(f"weight sync of policy version {version} failed: {details}")
    combined.__cause__ = next(iter(errors.values()))
    return combined
