"""The registry of inference engines and their capabilities, which are known without importing an engine.

    inference.engine ──► ENGINES ──► a description: `capabilities`, and a call that builds the engine of a spec
                                     (imports the engine's package only then)

`ENGINES` has the engines of this package; an installed package or a user's file adds others. A run's configuration
lists the required capabilities (`EngineRequirement`); `check_engine` compares them before anything starts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol, cast

from roll.errors import ConfigError, shorten
from roll.extensions import ExtensibleRegistry
from roll.registry import import_object
from roll.user_code import check_factory

if TYPE_CHECKING:
    from roll.protocols import InferenceEngine

__all__ = [
    "ENGINES",
    "LOGPROBS",
    "EngineCapabilities",
    "EngineFactory",
    "EngineRequirement",
    "LazyEngine",
    "check_engine",
    "check_engine_options",
    "check_lora_rank",
    "get_engine_capabilities",
    "list_engines_with",
    "resolve_engine_kind",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCapabilities:
    """Capabilities of an engine, and other facts that must be known before it starts.

    A user-defined engine declares its capabilities in the class attribute `capabilities`; without it, the defaults
    apply.
    """

    updates_weights: bool = True
    """True if `update_weights` replaces the engine's weights."""
    quantized_sync: bool = True
    """True if the engine accepts weights that are sent in 8 bits (`roll.weights.quantization.dequantize_stream`)."""
    shares_process: bool = False
    """True if the engine runs in the process that built it, so that no weights are copied (transport `in_process`)."""
    returns_logprobs: bool = True
    """True if `Generation.logprobs` are log-probs under the distribution from which the tokens were sampled."""
    scores_sequences: bool = True
    """True if the method `logprobs` computes log-probs of given tokens."""
    truncates_sampling: bool = True
    """True if log-probs of requests with top-p or top-k are those of the truncated distribution."""
    restricts_choices: bool = False
    """True if the engine can restrict sampling to `SamplingParams.choices`, and return the probability of each."""
    records_experts: bool = False
    """True if the engine returns the experts that MoE routers chose (`EngineSpec.records_experts`)."""
    continues_sampling: bool = False
    """True if a request with `SamplingParams.position` uses the same random numbers as an uninterrupted request."""
    can_sleep: bool = False
    """True if `sleep` frees the device memory."""
    tensor_parallel: bool = False
    """True if one engine can use several devices."""
    only_on_one_device: frozenset[str] = frozenset()
    """Names of capabilities that the engine does not have on several devices."""
    quantization: bool = False
    """True if the engine supports checkpoints with quantized weights."""
    quantized_compute: bool = False
    """True if the engine computes linear layers in 8 bits (`EngineSpec.quantization`)."""
    lora: bool = False
    """True if the engine generates with adapters (`EngineSpec.lora`, `GenerationRequest.adapter`)."""
    multimodal_lora: bool = False
    """True if models that read media may have adapters, on their language model."""
    moe_lora: bool = False
    """True if mixtures of experts may have adapters, outside of the experts."""
    dora: bool = False
    """True if adapters may have row norms (DoRA)."""
    max_lora_rank: int | None = None
    """The largest rank of adapters; `None` if there is no limit."""
    supports_images: bool = False
    """True if prompts may have images."""
    reserves_kv_cache: bool = False
    """True if the engine allocates its whole KV cache at the start, instead of as requests need it."""
    host_bytes: int = 0
    """Host memory that the engine uses on a CPU in addition to weights and KV cache."""
    kv_block_tokens: int = 32
    """Tokens of the KV cache blocks that requests with a common prefix share."""
    address_option: str = ""
    """Key of `EngineSpec.options` with the address of a server that already runs and then serves this one engine; empty
    if the engine has no such option."""
    sequential_options: Mapping[str, Any] = field(default_factory=dict)
    """`EngineSpec.options` for requests that arrive one at a time, so that they do not wait for each other."""
    test_note: str = ""
    """A sentence for `roll check` about what the engine has run on, if that matters to users."""
    missing_reasons: Mapping[str, str] = field(default_factory=dict)
    """Reasons why capabilities are missing on this machine, by capability; for messages."""


_CAPABILITY_DESCRIPTIONS: Mapping[str, str] = {
    "updates_weights": "load new weights",
    "quantized_sync": "receive 8-bit weights",
    "shares_process": "run in the trainer's process",
    "returns_logprobs": "return the log-probs of sampled tokens",
    "scores_sequences": "return the log-probs of given tokens",
    "truncates_sampling": "return log-probs under top-p or top-k sampling",
    "restricts_choices": "restrict sampling to given tokens",
    "records_experts": "record the experts that routers choose",
    "continues_sampling": "continue an interrupted answer with the same random state",
    "can_sleep": "free its memory",
    "tensor_parallel": "run on several devices",
    "quantization": "load quantized checkpoints",
    "quantized_compute": "compute in 8 bits",
    "lora": "generate with LoRA adapters",
    "multimodal_lora": "generate with adapters of a model that reads media",
    "moe_lora": "generate with adapters of a mixture of experts",
    "dora": "generate with DoRA adapters",
    "supports_images": "read images",
}
"""Descriptions of the capabilities that a run may need, for the message `… needs an engine that can …`."""


class EngineFactory(Protocol):
    """Interface of the entries of `ENGINES`: an engine class, or a `LazyEngine` if importing the class is expensive."""

    capabilities: EngineCapabilities

    def __call__(self, spec: Any, /) -> InferenceEngine:
        """Build the engine that an `EngineSpec` describes; its method `start` loads the model."""
        ...


@dataclass(frozen=True, kw_only=True)
class LazyEngine:
    """An engine class that is imported on first use, with the facts that are known before the import."""

    path: str
    """`package.module:Class`."""
    capabilities: EngineCapabilities
    library: str | None = None
    """The module that must be installed for the engine."""
    distributions: tuple[str, ...] = ()
    """Names of distributions that may provide the module."""
    install: str = ""
    """Command that installs the library."""
    check_options_path: str | None = None
    """Import path of a function that checks `inference.options` before the engine starts, and raises `ConfigError`."""
    prestart_path: str | None = None
    """Import path of a function with the argument `num_threads` that starts the engine's model-independent parts."""

    def __call__(self, spec: Any, /) -> InferenceEngine:
        """Import the class, and build the engine that a spec describes."""
        return cast("Callable[[Any], InferenceEngine]", import_object(self.path))(spec)

    @property
    def is_installed(self) -> bool:
        """True if the engine's library is installed, determined without importing it."""
        return self.library is None or importlib.util.find_spec(self.library) is not None

    @property
    def version(self) -> str:
        """Name and version of the engine's distribution; empty if the engine needs none, or if it is not installed."""
        for name in self.distributions:
            try:
                return f"{name} {metadata.version(name)}"
            except metadata.PackageNotFoundError:
                continue
        return ""

    def prestart(self, num_threads: int | None) -> AbstractContextManager[None] | None:
        """Return a context manager that starts the engine's model-independent parts early; `None` if it has none."""
        if self.prestart_path is None:
            return None
        begin = cast(Callable[[int | None], AbstractContextManager[None]], import_object(self.prestart_path))
        return begin(num_threads)


ENGINES: ExtensibleRegistry[EngineFactory] = ExtensibleRegistry(
    "inference engine",
    {
        "vllm": "roll.inference.vllm.description:VLLM_ENGINE",
        "hf": "roll.inference.hf_description:HF_ENGINE",
        "sglang": "roll.inference.sglang.description:SGLANG_ENGINE",
    },
    group="roll.engines",
)
"""Engines in the order in which `auto` looks for an installed one."""


def resolve_engine_kind(kind: str, key: str = "inference.engine") -> str:
    """Resolve `auto` to the first engine of this package that is installed; other names are returned unchanged.

    Args:
        kind: name or import path of an engine.
        key: key of the configuration, for messages.

    Raises:
        ConfigError: the engine does not exist, or its library is not installed.
    """
    if kind == "auto":
        return next(name for name in ENGINES.built_in_names if _is_installed(ENGINES.get(name)))
    engine = ENGINES.get(kind)
    if isinstance(engine, LazyEngine) and not engine.is_installed:
        instead = resolve_engine_kind("auto")
        install = f"{engine.install}, or " if engine.install else ""
        raise ConfigError(f"{key} is {kind}, but {engine.library} is not installed: {install}set {key}={instead}.")
    return kind


def get_engine_capabilities(kind: str) -> EngineCapabilities:
    """Return the capabilities of an engine, installed or not.

    Args:
        kind: name or import path of the engine; see `resolve_engine_kind` for `auto`.

    Raises:
        ConfigError: the engine does not exist, or its attribute `capabilities` has the wrong type.
    """
    found = getattr(ENGINES.get(resolve_engine_kind(kind) if kind == "auto" else kind), "capabilities", None)
    if found is None:
        return EngineCapabilities()
    if not isinstance(found, EngineCapabilities):
        raise ConfigError(
            f"the capabilities of the engine '{kind}' must be of type roll.inference.EngineCapabilities, got "
            f"{type(found).__name__}."
        )
    for name in _CAPABILITY_DESCRIPTIONS:
        if not isinstance(value := getattr(found, name), bool):
            raise ConfigError(
                f"the capability {name} of the engine '{kind}' must be True or False, got {shorten(value)}."
            )
    return found


def list_engines_with(capability: str) -> list[str]:
    """Return the names of all engines with a capability, from this package and from installed ones."""
    found: list[str] = []
    for name in ENGINES:
        try:
            found += [name] if getattr(get_engine_capabilities(name), capability) else []
        except ConfigError:  # an installed package that cannot be imported
            continue
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequirement:
    """A capability that a run requires from its engines."""

    capability: str
    """A field of `EngineCapabilities`."""
    reason: str
    """The key and value that need the capability, such as `cluster.sharing colocated`."""
    alternative: str = ""
    """An alternative, such as `set cluster.sharing to auto`; empty if only another engine helps."""


LOGPROBS = EngineRequirement(capability="returns_logprobs", reason="a policy that learns from its own rollouts")


def check_engine(kind: str, requirements: Iterable[EngineRequirement], key: str = "inference.engine") -> None:
    """Check that an engine has the capabilities that a run needs.

    Args:
        kind: name or import path of the engine.
        requirements: the required capabilities, with the reasons.
        key: key of the configuration that selects `kind`.

    Raises:
        ConfigError: the engine lacks a capability (the message names the engines that have it), or is not an engine.
    """
    kind = resolve_engine_kind(kind, key)
    capabilities = get_engine_capabilities(kind)
    if kind not in ENGINES.built_in_names:
        _check_user_engine(kind, key)
    requirements = list(requirements)
    sharded = next((each for each in requirements if each.capability == "tensor_parallel"), None)
    for requirement in requirements:
        if not getattr(capabilities, requirement.capability):
            raise ConfigError(_describe_missing_capability(kind, capabilities, requirement, key))
        if sharded is not None and requirement.capability in capabilities.only_on_one_device:
            raise ConfigError(
                f"{requirement.reason} is not supported by engine '{kind}' with {sharded.reason}: "
                f"{sharded.alternative}, use another engine ({key}), or {requirement.alternative}."
            )


def check_engine_options(kind: str, options: Mapping[str, Any]) -> None:
    """Check options of an engine that can be checked without starting it; see `LazyEngine.check_options_path`.

    Raises:
        ConfigError: The engine cannot start with these options.
    """
    engine = ENGINES.get(resolve_engine_kind(kind))
    if isinstance(engine, LazyEngine) and engine.check_options_path is not None:
        check = cast(Callable[[Mapping[str, Any]], None], import_object(engine.check_options_path))
        check(options)


def check_lora_rank(kind: str, rank: int, key: str, alternative: str = "") -> None:
    """Check that an engine supports adapters of a rank.

    Args:
        kind: name or import path of the engine.
        rank: the largest rank of the adapters.
        key: the key or option that sets the rank, for messages.
        alternative: another way to avoid the error, for messages.

    Raises:
        ConfigError: The rank is too high.
    """
    kind = resolve_engine_kind(kind)
    limit = get_engine_capabilities(kind).max_lora_rank
    if limit is not None and rank > limit:
        advice = f", or {alternative}" if alternative else ""
        raise ConfigError(
            f"{key} is {rank}, but the engine {kind} supports adapters up to rank {limit}: lower it{advice}."
        )


def _check_user_engine(kind: str, key: str) -> None:
    """Check that a user-defined engine accepts a spec and, if it is a class, has the methods of an engine."""
    from roll.protocols import InferenceEngine

    methods = [name for name, value in vars(InferenceEngine).items() if not name.startswith("_") and callable(value)]
    check_factory(ENGINES.get(kind), f"{key} '{kind}'", methods, "spec")


def _describe_missing_capability(
    kind: str, capabilities: EngineCapabilities, requirement: EngineRequirement, key: str
) -> str:
    name = requirement.capability
    others, why = list_engines_with(name), capabilities.missing_reasons.get(name, "")
    choices = [f"set {key} to {' or '.join(others)}" if others else "", requirement.alternative]
    advice = ", or ".join(filter(None, choices))
    return (
        f"{requirement.reason} requires an engine that can {_CAPABILITY_DESCRIPTIONS[name]} ({name}), but {key} is "
        f"{kind}{f' ({why})' if why else ''}{f': {advice}' if advice else ''}."
        f"{'' if others else ' No installed engine has this capability.'}"
    )


def _is_installed(engine: EngineFactory) -> bool:
    return not isinstance(engine, LazyEngine) or engine.is_installed


assert {*_CAPABILITY_DESCRIPTIONS} == {
    each.name for each in dataclasses.fields(EngineCapabilities) if each.type == "bool"
} - {"reserves_kv_cache"}, "every capability has a description"
