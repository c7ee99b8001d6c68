"""Where model-written programs run."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import field_validator, model_validator

from roll.config.base import Section, option, path_option

__all__ = ["SandboxConfig"]


class SandboxConfig(Section):
    """Sandboxes for rewards that run programs; started only if a reward needs them."""

    runtime: Literal["bubblewrap", "docker", "subprocess"] = option(
        "bubblewrap",
        "Isolation of programs. `subprocess` isolates nothing and needs `trust_programs`; it is for development.",
    )
    trust_programs: bool = option(
        False, "Whether programs that the model writes may do all that you may; only for the runtime `subprocess`."
    )
    image: str | None = option(
        None,
        "Image whose programs sandboxes have: of the Docker engine, or of `roll sandbox image`.",
        examples=["python:3.11-slim"],
    )
    max_parallel: int | None = option(
        None, "Maximum number of answers that run at once; by default one per CPU core.", ge=1
    )
    warm: int | None = option(
        None, "Number of started sandboxes of each kind to keep ready; by default `max_parallel`.", ge=0
    )
    memory_bytes: int = option(512 * 2**20, "Memory of one sandbox, its files included.", unit="bytes", ge=2**25)
    disk_bytes: int = option(64 * 2**20, "All files of one program together.", unit="bytes", ge=2**20)
    max_processes: int = option(64, "Processes and threads of one sandbox.", ge=8)
    preload: list[str] = option(
        ["bisect", "collections", "copy", "functools", "heapq", "itertools", "json", "math", "re", "string", "typing"],
        "Python modules that are imported before a program starts.",
    )
    packages: list[str] | None = option(
        None,
        "Installed Python packages that programs may import with the standard library; by default "
        "numpy, where "
        "sandboxes have this machine's Python.",
        examples=[["numpy", "sympy"]],
    )

    url: str | None = option(
        None,
        "URL of a sandbox service (`roll sandbox serve`) that runs programs instead of this machine.",
        examples=["https://sandboxes.example:8741"],
    )
    token_env: str = option(
        "ROLL_SANDBOX_TOKEN",
        "Environment variable that holds the service's token; the token itself is never written down.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
    )
    ca_file: str | None = path_option(
        None, "CA certificates (PEM) that verify the service; by default the system's.", min_length=1
    )
    reconnect_timeout_s: float = option(
        60.0,
        "Time to wait for a service that does not answer, or for the token's quota, before programs count as lost.",
        unit="s",
        gt=0,
    )

    @property
    def program_packages(self) -> list[str]:
        """Packages that programs may import: `packages`, or numpy if sandboxes are certain to have this Python."""
        if self.packages is not None:
            return self.packages
        return ["numpy"] if self.runtime == "bubblewrap" and self.image is None and self.url is None else []

    @property
    def own_tools(self) -> bool:
        """Whether programs can use the tool chains of this machine."""
        return self.runtime != "docker" and self.url is None

    @field_validator("url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it is not an address: write one such as 'http://127.0.0.1:8741'")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("only scheme, host, port and path belong into it: the token is taken from token_env")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _consistent(self) -> SandboxConfig:
        if self.url is not None and self.runtime != "bubblewrap":
            raise ValueError(f"with a url the service decides what isolates: remove runtime: {self.runtime}")
        if self.url is None and self.ca_file is not None:
            raise ValueError("ca_file is for a service: set url, or remove it")
        if self.runtime == "subprocess" and not self.trust_programs:
            raise ValueError(
                "the runtime subprocess isolates nothing: programs that the model writes could read and delete your "
                "files. Use bubblewrap or docker, or set trust_programs to true"
            )
        if self.trust_programs and self.runtime != "subprocess":
            raise ValueError(f"trust_programs is for the runtime subprocess, not for {self.runtime}: remove it")
        if self.image is not None and self.runtime == "subprocess":
            raise ValueError("the runtime subprocess has this machine's programs, and no image: remove image")
        if self.runtime == "subprocess" and self.packages:
            raise ValueError("with the runtime subprocess programs import what this Python can: remove packages")
        return self
