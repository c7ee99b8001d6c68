"""The sandbox manager that the tools and environments of one event loop share, while any of them is open."""

from __future__ import annotations

import asyncio
import copy
import weakref
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from roll.config.sandbox import SandboxConfig
from roll.errors import ConfigError
from roll.sandbox_errors import sandbox_errors
from roll.sandboxes import build_manager
from roll_sandbox import Limits, SandboxManager, SandboxSpec

__all__ = ["Runtime", "SandboxLease", "SandboxOptions"]

Runtime: TypeAlias = Literal["bubblewrap", "docker", "subprocess"]


@dataclass(eq=False)
class _SharedManager:
    manager: SandboxManager
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0
    is_running: bool = False


_SHARED_MANAGERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _SharedManager]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(kw_only=True, eq=False)
class SandboxOptions:
    """Options of sandboxes for a model's programs; each field is an argument.

    Args:
        runtime: The program that isolates the sandboxes. `subprocess` does not isolate programs.
        trust_programs: Must be true for `subprocess`, where programs have all permissions of the user.
        image: Container image of the runtime `docker`, or of a service.
        url, token_env, ca_file: A service that runs the sandboxes: see the section `sandbox` of a configuration.
    """

    runtime: Runtime = "bubblewrap"
    trust_programs: bool = False
    image: str | None = None
    url: str | None = None
    token_env: str = "ROLL_SANDBOX_TOKEN"
    ca_file: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments."""
        return {each.name: getattr(self, each.name) for each in fields(SandboxOptions)}


class SandboxLease:
    """A lease on the shared sandbox manager: the first `acquire` starts the manager, the last `release` closes it.

    Args:
        options: The sandbox options.
        limits: Limits of each sandbox.
    """

    def __init__(self, options: SandboxOptions, limits: Limits) -> None:
        if options.runtime == "subprocess" and not options.trust_programs:
            raise ConfigError(
                "the sandbox runtime 'subprocess' does not isolate programs: model-written programs could read and "
                "delete your files. Use bubblewrap or docker, or set trust_programs to true."
            )
        trust: Literal["trusted", "untrusted"] = "trusted" if options.trust_programs else "untrusted"
        self.spec = SandboxSpec(limits=limits, trust=trust, image=options.image, pool="environments")
        """The specification of the sandboxes to request."""
        self._config = SandboxConfig.model_construct(runtime=options.runtime)
        if options.url is not None:
            self._config = SandboxConfig(url=options.url, token_env=options.token_env, ca_file=options.ca_file)
        self._shared: _SharedManager | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SandboxLease:
        """Return a copy that has not acquired a manager yet."""
        twin = copy.copy(self)
        twin._shared = None
        return twin

    async def acquire(self) -> SandboxManager:
        """Return the running manager, which stays the same until `release`.

        Raises:
            SandboxUnavailableError: This machine cannot run sandboxes; the message gives the reason and a remedy.
        """
        if self._shared is not None:
            return self._shared.manager
        of_loop = _SHARED_MANAGERS.setdefault(asyncio.get_running_loop(), {})
        key = self._config.model_dump_json()
        shared = of_loop.get(key)
        if shared is None:
            shared = of_loop[key] = _SharedManager(build_manager(self._config, spec=self.spec, warm=1))
        async with shared.lock:
            if self._shared is None:  # concurrent episodes may both get here
                if not shared.is_running:
                    with sandbox_errors():
                        await shared.manager.start()
                    shared.is_running = True
                shared.num_users += 1
                self._shared = shared
        return shared.manager

    async def release(self) -> None:
        """Release the manager. Calling it twice is safe."""
        shared, self._shared = self._shared, None
        if shared is None:
            return
        shared.num_users -= 1  # before the wait below, which may be canceled
        async with shared.lock:
            if shared.is_running and not shared.num_users:
                shared.is_running = False
                await shared.manager.close()
