"""Sandboxes for model-generated programs."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import field_validator, model_validator

from roll.config.base import Section, option, path_option

__all__ = ["SandboxConfig"]


class SandboxConfig(Section):
    """Sandboxes for the programs of rewards, tools, agents and environments; started only if needed."""

    runtime: Literal["bubblewrap", "docker", "subprocess"] = option(
        "bubblewrap",
        "Isolation of programs. `subprocess` provides no isolation and requires `trust_programs`; use it only for "
        "development.",
    )
    trust_programs: bool = option(
        False,
        "Whether the model's programs may run with all permissions of the user; only for the runtime `subprocess`.",
    )
    image: str | None = option(
        None,
        "Image from which sandboxes are created: an image of the Docker engine, or one that `roll sandbox image` "
        "lists.",
        examples=["python:3.11-slim"],
    )
    max_parallel: int | None = option(
        None, "Maximum number of answers whose programs run concurrently; by default one per CPU core.", ge=1
    )
    warm: int | None = option(
        None, "Number of started sandboxes of each type to keep ready; by default `max_parallel`.", ge=0
    )
    memory_bytes: int = option(512 * 2**20, "Memory limit of one sandbox, including its files.", unit="bytes", ge=2**25)
    disk_bytes: int = option(64 * 2**20, "Limit on the total size of a program's files.", unit="bytes", ge=2**20)
    max_processes: int = option(64, "Maximum number of processes and threads of one sandbox.", ge=8)
    preload: list[str] = option(
        ["bisect", "collections", "copy", "functools", "heapq", "itertools", "json", "math", "re", "string", "typing"],
        "Python modules that are imported before a program starts.",
    )
    packages: list[str] | None = option(
        None,
        "Installed Python packages that programs may import in addition to the standard library; by default numpy, if "
        "sandboxes use this machine's Python.",
        examples=[["numpy", "sympy"]],
    )

    url: str | None = option(
        None,
        "URL of a sandbox service (`roll sandbox serve`) that runs programs instead of this machine.",
        examples=["https://sandboxes.example:8741"],
    )
    token_env: str = option(
        "ROLL_SANDBOX_TOKEN",
        "Environment variable with the service's token, which is never written to a file.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
    )
    ca_file: str | None = path_option(
        None, "CA certificates (PEM) for verifying the service; by default the system's CA certificates.", min_length=1
    )
    reconnect_timeout_s: float = option(
        60.0,
        "How long to wait for a service that does not respond, or for the token's quota, before programs count as "
        "lost.",
        unit="s",
        gt=0,
    )

    @property
    def program_packages(self) -> list[str]:
        """Packages that programs may import; by default numpy if sandboxes use this machine's Python, else none."""
        if self.packages is not None:
            return self.packages
        return ["numpy"] if self.runtime == "bubblewrap" and self.image is None and self.url is None else []

    @property
    def can_use_local_tools(self) -> bool:
        """True if sandboxed programs can use compilers and interpreters that are installed on this machine."""
        return self.runtime != "docker" and self.url is None

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"'{value}' is not a valid URL: expected, for example, 'http://127.0.0.1:8741'")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("the URL must contain only scheme, host, port and path: the token is read from token_env")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _check_combinations(self) -> SandboxConfig:
        if self.url is not None and self.runtime != "bubblewrap":
            raise ValueError(f"with a url, the service determines the runtime: remove `runtime: {self.runtime}`")
        if self.url is None and self.ca_file is not None:
            raise ValueError("ca_file is supported only with a service: set url, or remove ca_file")
        if self.runtime == "subprocess" and not self.trust_programs:
            raise ValueError(
                "the runtime subprocess does not isolate programs: programs that the model writes could read and "
                "delete your files. Use bubblewrap or docker, or set trust_programs to true"
            )
        if self.trust_programs and self.runtime != "subprocess":
            raise ValueError(
                f"trust_programs is supported only with the runtime subprocess, got {self.runtime}: remove "
                "trust_programs"
            )
        if self.image is not None and self.runtime == "subprocess":
            raise ValueError("the runtime subprocess does not support images: remove the key `image`")
        if self.runtime == "subprocess" and self.packages:
            raise ValueError(
                "the runtime subprocess lets programs import every installed package: remove the key `packages`"
            )
        return self
