"""Where an environment runs, and its timeouts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from roll.config.base import Section, option

__all__ = ["Hosting"]


class Hosting(Section):
    """Where an environment runs; its failure affects only its own episode."""

    host: Literal["loop", "pool", "sandbox", "http"] | None = option(
        None,
        "Where it runs. `loop`: in the controller, for what takes microseconds, or is written with `async def`. "
        "`pool`: each episode in a process of its own. `sandbox`: in one that can reach nothing else. `http`: on a "
        "server (`url`). By default a shipped one in the loop, and a class of your own in the pool.",
    )
    url: str | None = option(
        None, "Of the server, for host `http`.", pattern=r"^https?://", examples=["http://envs.example.org:8500"]
    )
    reset_time_limit_s: float = option(
        60.0, "An episode that takes longer to begin is given up, as a failure of ours.", unit="s", gt=0
    )
    step_time_limit_s: float = option(
        30.0, "An episode whose `step` takes longer is given up, as a failure of ours.", unit="s", gt=0
    )

    @model_validator(mode="after")
    def _address(self) -> Self:
        if self.host == "http" and self.url is None:
            raise ValueError("host http needs the url of the server that has the environment")
        if self.url is not None and self.host != "http":
            raise ValueError(f"url is of host http, but host is {self.host}: remove the one or change the other")
        return self
