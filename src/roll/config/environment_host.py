"""The host on which an environment runs, and its timeouts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from roll.config.base import Section, option

__all__ = ["HostingConfig"]


class HostingConfig(Section):
    """The host on which an environment runs; a failure of the environment affects only one episode."""

    host: Literal["loop", "pool", "sandbox", "http"] | None = option(
        None,
        "Where the environment runs. `loop`: in the controller, for environments whose steps take microseconds or "
        "that use `async def`. `pool`: each episode in a separate process. `sandbox`: each episode in a sandbox. "
        "`http`: on a server (`url`). By default, built-in environments use `loop`, and your own classes use `pool`.",
    )
    url: str | None = option(
        None,
        "URL of the server, for host `http`.",
        pattern=r"^https?://",
        examples=["http://envs.example.org:8500"],
    )
    reset_time_limit_s: float = option(
        60.0, "Time limit of `reset`; an episode that exceeds it fails with an infrastructure error.", unit="s", gt=0
    )
    step_time_limit_s: float = option(
        30.0, "Time limit of `step`; an episode that exceeds it fails with an infrastructure error.", unit="s", gt=0
    )

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        if self.host == "http" and self.url is None:
            raise ValueError("host http requires the url of the server that runs the environment")
        if self.url is not None and self.host != "http":
            raise ValueError(
                f"url is supported only with host http, got host {self.host}: remove url, or set host to http"
            )
        return self
