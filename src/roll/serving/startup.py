"""Starts the parts of a training server: trainer, engines, service and HTTP server."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import torch

from roll.cluster.base import Cluster, open_cluster
from roll.config.engines import (
    EngineRequirement,
    check_engine,
    check_lora_rank,
    get_engine_capabilities,
    resolve_engine_kind,
)
from roll.config.inference import InferenceConfig
from roll.config.model import LoRAConfig, ModelConfig
from roll.config.training import TrainingConfig
from roll.errors import ConfigError
from roll.inference import EngineSpec
from roll.models import describe_model, find_stop_token_ids, list_adapted_layers, load_tokenizer, resolve_model
from roll.serving.checkpoints import Checkpoints
from roll.serving.engine_calls import EngineCalls
from roll.serving.engines import ServedEngine, ServedEngines
from roll.serving.journal import Journal
from roll.serving.models import ModelTrainer, check_weights
from roll.serving.recovery import check_options, restore
from roll.serving.sampling import Sampler
from roll.serving.server import TrainingServer
from roll.serving.service import Service
from roll.serving.settings import ServeSettings
from roll.serving.snapshot_cache import EngineLayers, SnapshotCache, SnapshotId
from roll.training import TrainerSpec
from roll.training.adapter_snapshot import AdapterSnapshot

__all__ = ["open_server"]

logger = logging.getLogger(__name__)

CLEAN_UP_S = 60.0
DEFAULT_MAX_CONTEXT = 4096


@asynccontextmanager
async def open_server(
    settings: ServeSettings, report: Callable[[str], object] = logger.info
) -> AsyncIterator[TrainingServer]:
    """Load the base model into a trainer and engines, and serve until the end of the `with` block.

    Args:
        settings: The settings of the server.
        report: A function that shows the progress of the start to the user.

    Raises:
        ConfigError: The engine cannot sample with adapters, the context is longer than the model's, or the server
            cannot listen on the address.
        ModelError: The model cannot be loaded.
    """
    kind = resolve_engine_kind(settings.engine, "--engine")
    needs = [EngineRequirement(capability=name, reason="roll serve") for name in ("lora", "scores_sequences")]
    check_engine(kind, needs, "--engine")
    check_lora_rank(kind, settings.max_rank, "--max-rank")
    path = resolve_model(settings.model)
    description = describe_model(path)
    context = _choose_context(settings, description.context_length)
    async with AsyncExitStack() as stack:
        journal = Journal(settings.directory / "journal")
        stack.callback(journal.close)
        check_options(settings, journal.records)
        cluster = open_cluster(settings.cluster, settings.roles)
        stack.push_async_callback(cluster.close)
        report(f"Loading {settings.model} into the trainer ...")
        trainer = await cluster.start_trainer(_build_trainer_spec(settings, path), "actor_train")
        stack.push_async_callback(trainer.close)
        checkpoints = Checkpoints(settings.directory, settings.model_name, str(path))
        number = settings.num_engines
        report(f"Starting {'the engine' if number == 1 else f'{number} engines'} ({kind}) ...")
        engines = await _start_engines(settings, cluster, path, context, checkpoints, stack)
        service = Service(
            settings,
            ModelTrainer(trainer, context, description.vocab_size),
            _build_sampler(engines, path, context),
            checkpoints,
            journal,
            tokenizer_id=_find_tokenizer_id(settings.model, path),
            max_context=context,
        )
        if journal.records:
            num_requests = sum(record.kind == "request" for record in journal.records)
            report(f"Restoring the sessions of an earlier server ({num_requests} requests in its journal) ...")
        await restore(service, journal.records)
        journal.records.clear()
        await service.start()
        server = TrainingServer(service, settings.keys, settings.host, settings.port)
        try:
            await stack.enter_async_context(server)
        except OSError as error:
            address = f"{settings.host}:{settings.port}"
            raise ConfigError(f"cannot listen at {address}: {error}. Choose another --host or --port.") from error
        cleaning = asyncio.create_task(_clean_up(service), name="clean up")
        stack.callback(cleaning.cancel)
        yield server


def _choose_context(settings: ServeSettings, longest: int) -> int:
    if settings.max_context is not None and settings.max_context > longest:
        raise ConfigError(
            f"--max-context must be <= {longest}, the context length of {settings.model}, got {settings.max_context}."
        )
    return settings.max_context or min(longest, DEFAULT_MAX_CONTEXT)


async def _start_engines(
    settings: ServeSettings,
    cluster: Cluster,
    path: Path,
    context: int,
    checkpoints: Checkpoints,
    stack: AsyncExitStack,
) -> ServedEngines:
    kind = resolve_engine_kind(settings.engine, "--engine")
    group = await cluster.start_engines(_build_engine_specs(settings, path, kind, context), "actor_infer")
    stack.push_async_callback(group.close)
    layers = EngineLayers(
        shapes=list_adapted_layers(str(path), "all-linear"),
        lora=_build_lora(settings),
        dtype=getattr(torch, settings.dtype),
    )
    # Snapshots are sent by this process, from its memory, and all engines are on its machine.
    shares_process = settings.cluster.type == "local" and get_engine_capabilities(kind).shares_process
    transport = "in_process" if shares_process else "shared_memory"

    def read(snapshot: SnapshotId) -> AdapterSnapshot:
        found = checkpoints.load(checkpoints.find_any(*snapshot), optimizer=False)
        check_weights(found)
        return found

    def open_cache(engine: EngineCalls) -> SnapshotCache:
        return SnapshotCache(engine, transport, layers, settings.max_adapters, read)

    engines = ServedEngines([ServedEngine(group, engine, open_cache) for engine in group.engines])
    stack.push_async_callback(engines.close)
    await engines.start()
    return engines


def _build_sampler(engines: ServedEngines, path: Path, context: int) -> Sampler:
    return Sampler(
        engines,
        max_context=context,
        vocab_size=describe_model(path).vocab_size,
        end_token_ids=find_stop_token_ids(path),
        tokenizer=load_tokenizer(path),
    )


async def _clean_up(service: Service) -> None:
    while True:
        await asyncio.sleep(CLEAN_UP_S)
        try:
            await service.clean_up()
        except Exception:  # for example, the disk is full; it may not be the next time
            logger.exception("the clean-up failed, and is tried again")


def _find_tokenizer_id(model: str, path: Path) -> str:
    """Return the name with which `transformers` loads the tokenizer in a client: a hub ID, or a local directory."""
    is_hub_id = model.count("/") == 1 and not Path(model).exists()
    return model if is_hub_id else str(path.absolute())


def _build_lora(settings: ServeSettings) -> LoRAConfig:
    return LoRAConfig(rank=settings.max_rank, alpha=settings.alpha)


def _build_engine_specs(settings: ServeSettings, path: Path, kind: str, context: int) -> list[EngineSpec]:
    options = settings.engine_options or InferenceConfig()
    model = settings.model_config
    spec = EngineSpec(
        engine_id="sampler-0",
        kind=kind,
        model_path=str(path),
        dtype=settings.dtype,
        max_context=context,
        max_num_seqs=options.max_num_seqs,
        kv_cache_bytes=options.kv_cache_bytes,
        tensor_parallel=options.width,
        num_threads=settings.num_threads,
        lora=_build_lora(settings),
        max_adapters=settings.max_adapters,
        trust_remote_code=model is not None and model.trust_remote_code,
        options={**get_engine_capabilities(kind).sequential_options, **options.options},
    )
    return [dataclasses.replace(spec, engine_id=f"sampler-{index}") for index in range(settings.num_engines)]


def _build_trainer_spec(settings: ServeSettings, path: Path) -> TrainerSpec:
    """Return the spec of the trainer. Clients send all settings of the optimizer, so those of the spec are not used."""
    model = settings.model_config or ModelConfig(path=str(path), dtype=settings.dtype, lora=_build_lora(settings))
    training = settings.training_config or TrainingConfig(num_steps=1, num_threads=settings.num_threads)
    return TrainerSpec(
        model_path=str(path),
        model=model,
        # Each client has its own updates, and one that diverges must not end the others.
        training=training.model_copy(update={"max_nonfinite_steps": 2**31 - 1, "num_steps": training.num_steps or 1}),
    )
