"""The seams: what one room asks of another, and nothing more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from roll.types import (
    AttentionRange,
    EngineLoad,
    FloatArray,
    Generation,
    GenerationRequest,
    IntArray,
    Needs,
    Output,
    Outputs,
    Prompt,
    RewardResult,
    Rollout,
    StepResult,
    TrainingBatch,
    WeightReceipt,
    WeightUpdate,
)

if TYPE_CHECKING:
    import torch

    from roll.algorithms.inputs import LossInputs, LossOutputs

PauseMode: TypeAlias = Literal["keep", "abort", "drain"]
Item_co = TypeVar("Item_co", covariant=True)
StateKind: TypeAlias = Literal["parameters", "optimizer"]
"""Of a trainer: the network, and what updates alone need beside it."""


class LossFn(Protocol):
    """A loss; picklable, since it travels to the trainer's ranks."""

    @property
    def needs(self) -> Needs:
        """What the trainer must bring beside the network's predictions."""
        ...

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """A micro-batch's share of the loss of the global batch."""
        ...


@runtime_checkable
class InferenceEngine(Protocol):
    """Tokens in, tokens out; never tokenises. One asyncio loop drives it."""

    engine_id: str

    async def start(self) -> None:
        """Load the model. Other methods may be called only after this has returned."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Run one request to its end; an aborted one returns its partial tokens, `finish_reason="abort"`.

        Raises:
            EngineDiedError: the engine is gone; the request may be issued again elsewhere.
        """
        ...

    async def logprobs(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Per sequence [L]: log-prob of each token given those before it, temperature 1; entry 0 is 0."""
        ...

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests now; unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding: `keep` freezes running requests, `abort` ends them, `drain` lets them finish."""
        ...

    async def resume(self) -> None:
        """Decode again; kept requests continue where they were."""
        ...

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Fetch and apply new weights, and confirm what arrived; later tokens carry the new policy version.

        Raises:
            WeightSyncError: a tensor is missing, unknown, or of another shape; names it.
        """
        ...

    async def sleep(self) -> None:
        """Give the device's memory back, that of the weights too.

        Raises:
            UnsupportedError: the engine cannot do it here.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again; weights must be synced before the next request."""
        ...

    def load(self) -> EngineLoad:
        """How busy it is right now."""
        ...

    async def close(self) -> None:
        """End it and every process it started; may be called twice."""
        ...


@runtime_checkable
class SupportsReadback(Protocol):
    """An engine that can say which bytes it computes with. Optional: `isinstance(engine, SupportsReadback)`."""

    async def applied_checksums(self) -> Mapping[str, int] | None:
        """Read the weights back from where the engine computes with them.

        Returns:
            By tensor name, `roll.weights.tensor_checksum` of the tensor as it is held, in the manifest's dtype; names
            that cannot be read back (repacked, quantised, fused) are left out. `None`: nothing can be, or it would
            take longer than about 0.2 s per GB, since it is asked after every sync.
        """
        ...


@runtime_checkable
class WeightSource(Protocol):
    """Re-iterable stream of weights in the HF checkpoint's names; one tensor in memory at a time.

    With several ranks, iterating is collective: every rank iterates, rank 0 gets the full tensors, the others `None`s.
    """

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def names(self) -> Sequence[str]:
        """All names, in the order of iteration. Tied weights appear once."""
        ...


@runtime_checkable
class TrainBackend(Protocol):
    """One rank of a trainer. With several ranks, every method is collective and every rank gets the whole batch.

    A policy says log-probs and is trained; a critic says values and is trained; a reference says log-probs alone.
    """

    def train_step(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        """All micro-batches and one optimiser step."""
        ...

    def forward(
        self,
        batch: TrainingBatch,
        outputs: Outputs,
        *,
        attention: AttentionRange | None = None,
        num_top: int | None = None,
        adapter: bool = True,
        version: int | None = None,
    ) -> Mapping[Output, list[Any]]:
        """What the current weights say of a batch, in one pass without a gradient: for each output a list by sample.

        Args:
            batch: its tokens, where answers begin (`prefix_length`), and which tokens the loss counts.
            outputs: what is asked for. Log-probs are those under the batch's temperature, with 0 as the first entry;
                values and the likeliest tokens are 0 where the loss does not count.
            num_top: how many of the likeliest tokens, where `top_logprobs` is asked for.
            attention: distances that count, where `attention` is asked for; see `roll.algorithms.credit`.
            adapter: false leaves LoRA adapters out: the policy as it was before training.
            version: compute with the weights of this snapshot; a ValueError where there is none.

        Raises:
            UnsupportedError: the role's network does not give an output.
        """
        ...

    def keep_snapshot(self, version: int, versions: Collection[int]) -> None:
        """Copy the trained weights to main memory as `version`; let go of all that are not in `versions`."""

    def measure(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        """What a loss and its metrics are under the current weights; changes nothing."""
        ...

    def weights(self) -> WeightSource:
        """What the engines must hold: LoRA merged, engine's dtype, HF names."""
        ...

    def save(self, path: Path, *, background: bool = False) -> None:
        """Write everything needed to go on (weights, optimiser, schedule, this rank's RNG) below `path`.

        In the background: as it is now, while training goes on; what was begun before is finished first.
        """
        ...

    def written(self, *, wait: bool) -> bool:
        """Whether the last save is on the disk; one in the background that failed raises here, once."""
        ...

    def load(self, path: Path) -> None:
        """Read what `save` wrote, also under another number of ranks."""
        ...

    def export(self, path: Path) -> None:
        """Write an HF safetensors model directory that `transformers` loads."""
        ...

    def offload(self, states: Collection[StateKind]) -> None:
        """Hand the device's memory to other roles, between steps: move states to main memory."""
        ...

    def reload(self, states: Collection[StateKind]) -> None:
        """Take it back: move states to the device, where whatever computes with them must find them."""
        ...


class Scorer(Protocol):
    """Whatever says something of a batch: a trainer, a reference, a policy without its adapters."""

    async def forward(self, batch: TrainingBatch, outputs: Outputs) -> Mapping[Output, list[Any]]:
        """See `TrainBackend.forward`."""
        ...


class TrainerGroup(ABC):
    """All ranks of a trainer, seen from the controller: each method of a `TrainBackend`, which says what it does, as a
    coroutine. `cluster/` has an in-process one and a Ray one.
    """

    @property
    @abstractmethod
    def num_ranks(self) -> int: ...

    @abstractmethod
    async def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """A method of the back-end's, on all ranks; what rank 0 answers."""

    async def train_step(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        return await self._call("train_step", batch, loss)

    async def forward(
        self,
        batch: TrainingBatch,
        outputs: Outputs,
        *,
        attention: AttentionRange | None = None,
        num_top: int | None = None,
        adapter: bool = True,
        version: int | None = None,
    ) -> Mapping[Output, list[Any]]:
        own = {} if version is None else {"version": version}
        return await self._call("forward", batch, outputs, attention=attention, num_top=num_top, adapter=adapter, **own)

    async def keep_snapshot(self, version: int, versions: Collection[int]) -> None:
        await self._call("keep_snapshot", version, tuple(versions))

    async def measure(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        return await self._call("measure", batch, loss)

    @abstractmethod
    async def send_weights(
        self, policy_version: int, transport: str, deliver: Callable[[WeightUpdate], Awaitable[None]]
    ) -> Mapping[str, int]:
        """Offer the weights through `deliver`, send while it runs, let go of them when it returns.

        Returns:
            By tensor name, the 64-bit checksum of the bytes that were sent.
        """

    async def save(self, path: Path, *, background: bool = False) -> None:
        await self._call("save", path.absolute(), background=background)

    async def written(self, *, wait: bool) -> bool:
        return await self._call("written", wait=wait)

    async def load(self, path: Path) -> None:
        await self._call("load", path.absolute())

    async def export(self, path: Path) -> None:
        await self._call("export", path.absolute())

    async def offload(self, states: Collection[StateKind]) -> None:
        await self._call("offload", states)

    async def reload(self, states: Collection[StateKind]) -> None:
        await self._call("reload", states)

    @abstractmethod
    async def close(self) -> None: ...


@runtime_checkable
class EngineGroup(Protocol):
    """All inference engines of a run, seen from the controller."""

    @property
    def engines(self) -> Sequence[InferenceEngine]: ...

    async def replace(self, engine_id: str) -> InferenceEngine:
        """End what is left of an engine and start a fresh one in its place, with the same id and initial weights."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Reward(Protocol):
    """Scores a rollout. A wrong answer gets a low value; an exception means that *we* failed."""

    async def __call__(self, rollout: Rollout) -> RewardResult: ...


class Draw(Protocol):
    """One use of something in the data, as the ledger knows it."""

    @property
    def draw_id(self) -> int: ...

    @property
    def uid(self) -> str:
        """Of what was drawn, the same whenever it is drawn again."""
        ...


@runtime_checkable
class KeptObject(Protocol):
    """An object in a process of its own, which one caller asks one thing after the other."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of it, or a coroutine method; where this is cancelled, its process is ended.

        Raises:
            WorkerDiedError: its process died, or was ended.
            Exception: whatever the method raised.
        """
        ...

    async def close(self) -> None:
        """End its process, with all that it started, at once; may be called twice."""
        ...


@runtime_checkable
class WorkerPool(Protocol):
    """Processes that run plain functions away from the controller; `cluster/` has the Ray one."""

    async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
        """Run `function(*args)` in a worker.

        Raises:
            TimeoutError: it took longer than `time_limit_s`; the worker was ended and replaced.
            WorkerDiedError: the worker died.
        """
        ...

    async def keep(
        self, factory: Callable[..., Any], *args: Any, prepare: tuple[Callable[..., Any], tuple[Any, ...]]
    ) -> KeptObject:
        """Make `factory(*args)` in a process of its own, and keep it there until it is closed.

        Args:
            factory: a module-level function of an importable module.
            args: its arguments.
            prepare: a function and its arguments, called once in the process that all of its kind are forked from:
                what it imports and loads, they share.

        Raises:
            WorkerDiedError: the process died.
            Exception: whatever `factory` or `prepare` raised.
        """
        ...

    def beside(self, num_workers: int) -> WorkerPool:
        """Another pool in the same places, for work that must not wait for this one's; without a limit of memory.

        Its processes start when they are first needed. Whoever asked for it closes it.
        """
        ...

    def health(self) -> dict[str, int]:
        """Counts: `workers`, `busy`, `restarts`, `timeouts`."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Items(Protocol[Item_co]):
    """A finite, ordered, indexable set of prompts or examples; order and content depend on its settings alone."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item_co: ...


PromptSource: TypeAlias = Items[Prompt]
