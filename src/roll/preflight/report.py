"""The results of `roll check`, collected by a pipeline's check, and their text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roll.config.judge import JudgeConfig
from roll.errors import short

if TYPE_CHECKING:
    from roll.cluster.devices import Placement, PlacementSlot
    from roll.config.estimate import DiskUse, JudgeEngines, RoleMemory
    from roll.config.run import RunConfig
    from roll.models import ModelDescription
    from roll.preflight.machine import Machine
    from roll.types import Prompt

__all__ = ["Report", "RewardTrial", "aligned", "render"]


@dataclass(frozen=True, kw_only=True)
class RewardTrial:
    """A domain's reward for a correct answer and for a wrong one.

    If the prompt has no reference answer, `right` is empty, and the two are any texts.
    """

    domain: str
    right: str
    right_value: float
    wrong: str
    wrong_value: float

    @property
    def tells_apart(self) -> bool:
        """Whether the correct answer, if it is known, has a higher reward."""
        return not self.right or self.right_value > self.wrong_value


@dataclass(kw_only=True)
class Report:
    """The results of a check; `None` for those that a problem prevents."""

    config: RunConfig
    method: str
    """The training method and its length, in a few words."""
    machine: Machine
    engine_kind: str | None = None
    placement: Placement | None = None
    hands_over: bool = False
    """Whether engines and trainers take turns in using the memory of shared devices."""
    model: ModelDescription | None = None
    critic: ModelDescription | None = None
    """The critics' backbone, if it is not the policy's."""
    judge: JudgeEngines | None = None
    """The run's own judge, if it has one on this machine."""
    longest_prompt: int | None = None
    max_context: int | None = None
    """Maximum number of tokens after a prompt: all answers, and the environment's observations between them."""
    sample: tuple[Prompt, str, int] | None = None
    """A prompt, its rendering for the model, and its tokens."""
    examples: dict[str, Prompt] = field(default_factory=dict)
    """A training prompt of each domain."""
    num_held_out: int = 0
    train_prompts: dict[str, int] = field(default_factory=dict)
    batch: list[str] = field(default_factory=list)
    """Batch arithmetic of a step and of the run, in words."""
    memory: list[RoleMemory] = field(default_factory=list)
    step_s: float | None = None
    """Seconds of a step on this machine, if they could be measured."""
    disk: DiskUse | None = None
    free_disk_bytes: int | None = None
    layout: list[str] = field(default_factory=list)
    """What ranks hold and send in a step, in words, if it was tried."""
    trials: list[RewardTrial] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Problems that prevent the run."""
    notes: list[str] = field(default_factory=list)
    """Notes that do not prevent the run."""

    def __str__(self) -> str:
        return render(self)


def render(report: Report) -> str:
    """Format the report as sections of aligned lines, for a terminal."""
    config = report.config
    lines = [f"{config.name}: {config.pipeline}, {report.method}"]
    for title, section in (
        ("Roles", _roles(report)),
        ("Batch", report.batch),
        ("Dry run", report.layout),
        ("Files", _files(report)),
        ("Prompt", _prompt(report)),
        ("Reward", _rewards(report)),
        ("Notes", report.notes),
    ):
        body = list(section)
        if body:
            lines += ["", title, *(f"  {line}" for line in body)]
    return "\n".join(lines)


def _roles(report: Report) -> Iterator[str]:
    machine = report.machine
    devices = f"{len(machine.accelerator_bytes)} accelerators" if machine.accelerator_bytes else "no accelerator"
    yield f"cluster {report.config.cluster.type}; here: {machine.num_cores} cores, {devices}"
    if report.model is not None:
        model = report.model
        yield (
            f"model {report.config.model.path}: {model.num_parameters / 1e6:,.0f} M parameters, "
            f"{report.config.model.dtype}, context {model.context_length:,}"
        )
    if report.judge is not None:
        judge = report.config.section("judge", JudgeConfig)
        yield (
            f"judge {judge.model}: {report.judge.sizes.num_parameters / 1e6:,.0f} M parameters, {judge.dtype}, "
            f"{report.judge.kind}, context {report.judge.max_context:,}; its weights stay as they are"
        )
    rows = [("role", "where", "number", "memory", "made up of")]
    for role in report.memory:
        parts = ", ".join(f"{name} {_size(size)}" for name, size in role.parts.items())
        rows.append((role.role, _where(report, role.role), str(role.count), _size(role.bytes_total), parts))
    if report.memory:
        yield from aligned(rows)
        yield f"together up to {_size(sum(role.bytes_total for role in report.memory))} {_available(report)}"
    if report.hands_over:
        yield "engines and trainers hand the memory of shared devices over: the one sleeps while the other works"


def _available(report: Report) -> str:
    machine = report.machine
    if machine.accelerator_bytes:
        return "of device memory, " + ", ".join(_size(free) for free in machine.accelerator_bytes) + " free"
    return f"of memory, {_size(machine.memory_bytes)} free"


def _where(report: Report, role: str) -> str:
    if report.placement is None or role in ("rollouts", "rewards"):
        return "this process"
    if role == "processes":
        return "one for each"
    return "; ".join(dict.fromkeys(_seat(seat) for seat in report.placement.seats[role]))


def _seat(seat: PlacementSlot) -> str:
    numbers = ", ".join(str(device) for device in seat.local_devices)
    return f"node {seat.node} device {numbers}"


def _files(report: Report) -> Iterator[str]:
    yield f"{report.config.run_dir}/"
    if report.disk is not None:
        number = report.disk.num_checkpoints
        yield (
            f"{number} checkpoint{'' if number == 1 else 's'} of {_size(report.disk.checkpoint_bytes)}, "
            f"rollouts up to {_size(report.disk.rollout_bytes)}"
            + (f", kept of teachers {_size(report.disk.kept_bytes)}" if report.disk.kept_bytes else "")
            + f"; {_size(report.disk.peak_bytes)} while saving"
        )
    if report.free_disk_bytes is not None:
        yield f"{_size(report.free_disk_bytes)} free on this disk"


def _prompt(report: Report) -> Iterator[str]:
    if report.sample is None:
        return
    prompt, text, num_tokens = report.sample
    longest = f" (the longest of all has {report.longest_prompt})" if prompt.environment is None else ""
    yield f"{prompt.uid}, {num_tokens} tokens{longest}"
    shown = text.splitlines()[:20]
    yield from (f"| {line[:100]}" for line in shown)


def _rewards(report: Report) -> Iterator[str]:
    for trial in report.trials:
        right, wrong = ("right", "wrong") if trial.right else ("nothing", "no reference answer is known")
        yield (
            f"{trial.domain}: {short(trial.right)} ({right}) scores {trial.right_value:g}, "
            f"{short(trial.wrong)} ({wrong}) scores {trial.wrong_value:g}"
        )


def _size(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
