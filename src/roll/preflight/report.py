"""The results of `roll check`, collected by a pipeline's check, and their formatting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roll.config.judge import JudgeConfig
from roll.errors import shorten

if TYPE_CHECKING:
    from roll.cluster.devices import Placement, PlacementSlot
    from roll.config.estimate import DiskUse, JudgeEngines, RoleMemory
    from roll.config.run import RunConfig
    from roll.models import ModelDescription
    from roll.preflight.machine import Machine
    from roll.types import Prompt

__all__ = ["Report", "RewardTrial", "align_rows", "render"]


@dataclass(frozen=True, kw_only=True)
class RewardTrial:
    """The rewards of a correct and an incorrect answer to a prompt of a domain.

    If the prompt has no reference answer, `correct_answer` is empty and `incorrect_answer` is an arbitrary string.
    """

    domain: str
    correct_answer: str
    correct_reward: float
    incorrect_answer: str
    incorrect_reward: float

    @property
    def prefers_correct(self) -> bool:
        """True if the correct answer has a higher reward than the incorrect one, or no correct answer is known."""
        return not self.correct_answer or self.correct_reward > self.incorrect_reward


@dataclass(kw_only=True)
class Report:
    """The results of `roll check` for a run; a field is `None` if a problem prevented its check."""

    config: RunConfig
    method: str
    """Short description of the training method and the number of steps."""
    machine: Machine
    engine_kind: str | None = None
    placement: Placement | None = None
    is_colocated: bool = False
    """True if engines and trainers take turns in using the memory of shared devices."""
    model: ModelDescription | None = None
    critic: ModelDescription | None = None
    """Sizes of the critics' backbone, if it is not the policy's."""
    judge: JudgeEngines | None = None
    """The run's judge, if it has one on this machine."""
    longest_prompt: int | None = None
    media_per_prompt: int = 0
    """Maximum number of feature tokens per prompt or episode; repeated images count once."""
    max_context: int | None = None
    """Longest context of the engines in tokens: a prompt, all answers, and the environment's observations."""
    sample: tuple[Prompt, str, int] | None = None
    """A prompt, its rendering for the model, and its number of tokens."""
    examples: dict[str, Prompt] = field(default_factory=dict)
    """A training prompt of each domain."""
    num_held_out: int = 0
    train_prompts: dict[str, int] = field(default_factory=dict)
    batch: list[str] = field(default_factory=list)
    """Descriptions of the batch sizes of a step and of the run."""
    memory: list[RoleMemory] = field(default_factory=list)
    step_s: float | None = None
    """Estimated seconds of a step on this machine, if it could be timed."""
    disk: DiskUse | None = None
    free_disk_bytes: int | None = None
    layout: list[str] = field(default_factory=list)
    """Descriptions of the memory and traffic of ranks in a step, from a dry run."""
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
        ("Roles", _format_roles(report)),
        ("Batch", report.batch),
        ("Dry run", report.layout),
        ("Files", _format_files(report)),
        ("Prompt", _format_prompt(report)),
        ("Reward", _format_rewards(report)),
        ("Notes", report.notes),
    ):
        body = list(section)
        if body:
            lines += ["", title, *(f"  {line}" for line in body)]
    return "\n".join(lines)


def _format_roles(report: Report) -> Iterator[str]:
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
        judge = report.config.get_section("judge", JudgeConfig)
        yield (
            f"judge {judge.model}: {report.judge.sizes.num_parameters / 1e6:,.0f} M parameters, {judge.dtype}, "
            f"{report.judge.kind}, context {report.judge.max_context:,}, frozen"
        )
    rows = [("role", "where", "number", "memory", "parts")]
    for role in report.memory:
        parts = ", ".join(f"{name} {_format_size(size)}" for name, size in role.parts.items())
        rows.append(
            (role.role, _describe_devices(report, role.role), str(role.count), _format_size(role.bytes_total), parts)
        )
    if report.memory:
        yield from align_rows(rows)
        total = _format_size(sum(role.bytes_total for role in report.memory))
        yield f"total: up to {total} {_format_available(report)}"
    if report.is_colocated:
        yield "engines and trainers share devices: engines sleep during training, and trainers are offloaded otherwise"


def _format_available(report: Report) -> str:
    machine = report.machine
    if machine.accelerator_bytes:
        return "of device memory, " + ", ".join(_format_size(free) for free in machine.accelerator_bytes) + " free"
    return f"of memory, {_format_size(machine.memory_bytes)} free"


def _describe_devices(report: Report, role: str) -> str:
    if report.placement is None or role in ("rollouts", "rewards"):
        return "this process"
    if role == "processes":
        return "one for each"
    return "; ".join(dict.fromkeys(_format_slot(slot) for slot in report.placement.slots[role]))


def _format_slot(slot: PlacementSlot) -> str:
    numbers = ", ".join(str(device) for device in slot.local_devices)
    return f"node {slot.node} device {numbers}"


def _format_files(report: Report) -> Iterator[str]:
    yield f"{report.config.run_dir}/"
    if report.disk is not None:
        number = report.disk.num_checkpoints
        yield (
            f"{number} checkpoint{'' if number == 1 else 's'} of {_format_size(report.disk.checkpoint_bytes)}, "
            f"rollouts up to {_format_size(report.disk.rollout_bytes)}"
            + (f", log-probs of teachers {_format_size(report.disk.stored_bytes)}" if report.disk.stored_bytes else "")
            + f"; at most {_format_size(report.disk.peak_bytes)} while saving"
        )
    if report.free_disk_bytes is not None:
        yield f"{_format_size(report.free_disk_bytes)} free on this disk"


def _format_prompt(report: Report) -> Iterator[str]:
    if report.sample is None:
        return
    prompt, text, num_tokens = report.sample
    longest = f" (longest prompt: {report.longest_prompt})" if prompt.environment is None else ""
    yield f"{prompt.uid}, {num_tokens} tokens{longest}"
    lines = text.splitlines()[:20]
    yield from (f"| {line[:100]}" for line in lines)


def _format_rewards(report: Report) -> Iterator[str]:
    for trial in report.trials:
        right, wrong = (
            ("correct", "incorrect") if trial.correct_answer else ("empty answer", "the reference answer is unknown")
        )
        yield (
            f"{trial.domain}: {shorten(trial.correct_answer)} ({right}) scores {trial.correct_reward:g}, "
            f"{shorten(trial.incorrect_answer)} ({wrong}) scores {trial.incorrect_reward:g}"
        )


def _format_size(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"


def align_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines, with the cells of each column padded to equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
