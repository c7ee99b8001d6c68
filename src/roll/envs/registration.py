"""Find environments by name: shipped ones, registered ones, and any class by its path.

make("game:Sudoku-v0-easy")        make("mazes.py:Maze", size=5)        make("my_package.mazes:Maze", size=5)
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from roll.envs.adapters import ADAPTERS
from roll.envs.games.catalogue import GAMES
from roll.envs.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from roll.envs.worlds import WORLDS
from roll.errors import ConfigError, DataError, UserError
from roll.extensions import ExtensibleRegistry
from roll.registry import did_you_mean, find_similar_names, import_object
from roll.user_code import load_function

__all__ = [
    "ADAPTER_PATHS",
    "ENVS",
    "INSTALLED_ENVS",
    "EnvSpec",
    "find",
    "is_user_class",
    "make",
    "make_vec",
    "register",
]

EntryPoint = str | Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """The specification of a registered environment.

    Args:
        id: The name.
        entry_point: The class or function that builds the environment, or its import path `package.module:Class`.
        options: Default arguments.
    """

    id: str
    entry_point: EntryPoint
    options: Mapping[str, Any]

    def load(self) -> Callable[..., Any]:
        """Return the class or function that builds the environment.

        Raises:
            ConfigError: The class or function cannot be imported.
        """
        builder = import_object(self.entry_point) if isinstance(self.entry_point, str) else self.entry_point
        if not callable(builder):
            raise ConfigError(f"environment '{self.id}': '{self.entry_point}' is neither a class nor a function.")
        return builder


ENVS: dict[str, EnvSpec] = {
    name: EnvSpec(id=name, entry_point=entry_point, options=options)
    for name, (entry_point, options) in {**GAMES, **WORLDS}.items()
}
ENVS["guess_number"] = EnvSpec(id="guess_number", entry_point="roll.envs.guess_number:GuessNumber", options={})

ADAPTER_PATHS: dict[str, str] = dict(ADAPTERS)
"""Import paths (`package.module:function`) of the functions that build environments of other libraries, by the prefix
before the colon. They are called with the name after the colon and the options.
"""

INSTALLED_ENVS: ExtensibleRegistry[Callable[..., Any]] = ExtensibleRegistry(
    "environment", {}, group="roll.environments"
)
"""Environments that installed packages register as entry points. They run in separate processes, as user code."""


def register(id: str, entry_point: EntryPoint, **kwargs: Any) -> None:
    """Register an environment under a name.

    Args:
        id: The name, such as `mine:Maze-v0`.
        entry_point: A class or function, or an import path `package.module:Class`, which other processes can use too.
        kwargs: Default arguments.

    Raises:
        ConfigError: Another environment has this name.
    """
    spec = EnvSpec(id=id, entry_point=entry_point, options=kwargs)
    if ENVS.setdefault(id, spec) != spec:
        raise ConfigError(
            f"environment '{id}' is registered as {ENVS[id].entry_point} with {dict(ENVS[id].options)}: choose another "
            "name."
        )


def find(id: str) -> EnvSpec:
    """Return the specification for a name.

    Args:
        id: A registered name (including those registered by installed packages), `family:name`, `file.py:Class`, or
            `package.module:Class`.

    Raises:
        ConfigError: The name is unknown, or its class cannot be imported.
    """
    if id in ENVS:
        return ENVS[id]
    family, colon, rest = id.partition(":")
    if family in ADAPTER_PATHS and rest:
        return EnvSpec(id=id, entry_point=_AdapterFactory(ADAPTER_PATHS[family], rest), options={})
    if colon and family not in {known.partition(":")[0] for known in ENVS if ":" in known}:
        return EnvSpec(id=id, entry_point=load_function(id, "environment"), options={})
    if not colon and id in INSTALLED_ENVS:
        return EnvSpec(id=id, entry_point=INSTALLED_ENVS.get(id), options={})
    if id.endswith(".py"):
        raise ConfigError(f"environment '{id}' is a file: specify the class in the file, for example {id}:Maze.")
    close = find_similar_names(id, [*ENVS, *INSTALLED_ENVS], limit=3, cutoff=0.5)
    meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise ConfigError(
        f"unknown environment '{id}'.{meant} `roll env list` shows all environments; write your own as file.py:Class."
    )


def is_user_class(id: str) -> bool:
    """Return whether a name is the path of a user-defined class: neither registered nor from another library."""
    return id not in ENVS and id.partition(":")[0] not in ADAPTER_PATHS


def make(id: str, options: Mapping[str, Any] | None = None, /, **overrides: Any) -> Any:
    """Build an environment.

    Args:
        id: The environment's name, as for `find`.
        options: Arguments that override the registered arguments.
        overrides: Further arguments, as keywords.

    Raises:
        ConfigError: The name is unknown, or its object is not an environment.
        DataError: The environment has no such argument, or rejects its value.
    """
    spec = find(id)
    kind = spec.load()
    missing = [method for method in ("reset", "step") if not callable(getattr(kind, method, None))]
    if isinstance(kind, type) and missing:
        raise ConfigError(
            f"environment '{id}' has no method {' and no '.join(map(repr, missing))}: implement `reset(seed)` and "
            "`step(action)` as described in docs/environments.md."
        )
    arguments = {**spec.options, **(options or {}), **overrides}
    _reject_unknown_arguments(id, kind, arguments)
    try:
        env = kind(**arguments)
    except UserError:  # its message already names the mistake
        raise
    except (TypeError, ValueError) as error:
        raise DataError(f"environment '{id}' rejected the options {arguments}: {error}") from error
    with contextlib.suppress(AttributeError):  # GEM's code may read it; with `__slots__` it cannot be set
        env.env_id = id
    return env


def make_vec(
    ids: str | Sequence[str],
    wrappers: Sequence[Callable[[Any], Any]] = (),
    vec_kwargs: Sequence[Mapping[str, Any]] | None = None,
    async_mode: bool = False,
    seed: int | None = 0,
    autoreset: Literal["same_step", "next_step", "disabled"] = "same_step",
    **kwargs: Any,
) -> VectorEnv:
    """Build several environments that are stepped together.

    Args:
        ids: One name per environment.
        wrappers: Wrappers around each environment, the first one innermost.
        vec_kwargs: Arguments of each environment.
        async_mode: Whether to step the environments concurrently: in threads, or on one event loop if they are
            asynchronous.
        seed: Seed of the first episode of environment 0; environment i has `seed + i`. With None, the episodes are not
            reproducible.
        autoreset: The behavior at the end of an episode: see `VectorEnv`.
        kwargs: Arguments of all environments.

    Raises:
        ConfigError: A name is unknown.
        DataError: The arguments are invalid.
    """
    names = [ids] if isinstance(ids, str) else list(ids)
    if vec_kwargs is not None and len(vec_kwargs) != len(names):
        raise DataError(
            f"vec_kwargs has {len(vec_kwargs)} entries for {len(names)} environments: pass one entry per environment."
        )
    envs = []
    for index, name in enumerate(names):
        env = make(name, {**kwargs, **(vec_kwargs[index] if vec_kwargs is not None else {})})
        for wrapper in wrappers:
            env = wrapper(env)
        envs.append(env)
    kind = AsyncVectorEnv if async_mode else SyncVectorEnv
    return kind(envs, env_ids=names, autoreset=autoreset, seed=seed)


@dataclass(frozen=True)
class _AdapterFactory:
    """Builds an environment of another library; `name` is the part of the ID after the prefix, such as `gym:`."""

    path: str
    name: str

    def __call__(self, **options: Any) -> Any:
        build: Any = import_object(self.path)
        return build(self.name, **options)


def _reject_unknown_arguments(id: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Reject misspelled arguments, even if the environment would accept them silently through a `**_` parameter."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a class that is not written in Python
        return
    if any(each.kind is each.VAR_KEYWORD and not each.name.startswith("_") for each in parameters):
        return
    accepted = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    unknown = [name for name in arguments if name not in accepted]
    if unknown:
        raise DataError(
            f"environment '{id}' has no argument "
            f"{' and no '.join(map(repr, unknown))}.{did_you_mean(unknown[0], accepted)} Supported arguments: "
            f"{', '.join(accepted) or 'none'}."
        )
