"""Where programs of a model run."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import Section, option

__all__ = ["SandboxConfig"]


class SandboxConfig(Section):
    """Sandboxes for rewards that run programs; started only where a reward needs them."""

    runtime: Literal["bubblewrap", "docker", "subprocess"] = option(
        "bubblewrap",
        "What isolates programs. `subprocess` isolates nothing and needs `trust_programs`; it is for development.",
    )
    trust_programs: bool = option(
        False, "Whether programs that the model writes may do all that you may; only for the runtime `subprocess`."
    )
    image: str | None = option(
        None,
        "Image whose programs sandboxes have: of the Docker engine, or of `roll sandbox image`.",
        examples=["python:3.11-slim"],
    )
    max_parallel: int | None = option(None, "Answers that run at once; one per CPU core by default.", ge=1)
    warm: int | None = option(
        None, "Started sandboxes to keep ready, of each kind; as many as run at once by default.", ge=0
    )
    memory_bytes: int = option(512 * 2**20, "Memory of one sandbox, its files included.", unit="bytes", ge=2**25)
    disk_bytes: int = option(64 * 2**20, "All files of one program together.", unit="bytes", ge=2**20)
    max_processes: int = option(64, "Processes and threads of one sandbox.", ge=8)
    preload: list[str] = option(
        ["bisect", "collections", "copy", "functools", "heapq", "itertools", "json", "math", "re", "string", "typing"],
        "Python modules that programs find imported already.",
    )
    packages: list[str] = option(
        [], "Installed Python packages that programs may import, besides the standard library.", examples=[["numpy"]]
    )

    @model_validator(mode="after")
    def _consistent(self) -> SandboxConfig:
        if self.runtime == "subprocess" and not self.trust_programs:
            raise ValueError(
                "the runtime subprocess isolates nothing: programs that the model writes could read and delete your "
                "files. Use bubblewrap or docker, or set trust_programs to true"
            )
        if self.trust_programs and self.runtime != "subprocess":
            raise ValueError(f"trust_programs is for the runtime subprocess, not for {self.runtime}: remove it")
        if self.image is not None and self.runtime != "docker":
            raise ValueError(f"image is for the runtime docker, not for {self.runtime}: remove it")
        if self.runtime == "subprocess" and self.packages:
            raise ValueError("with the runtime subprocess programs import what this Python can: remove packages")
        return self
