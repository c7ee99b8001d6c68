"""The commands of `roll`. Each command imports its dependencies when it runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from roll.cli.completion import complete_directories, complete_files
from roll.cli.doctor import doctor
from roll.cli.environments import env
from roll.cli.init import init
from roll.cli.migration.command import from_trl, from_verl
from roll.cli.reward_commands import reward
from roll.cli.run_commands import chat, compare, view
from roll.cli.serve import serve
from roll_sandbox.cli import sandbox

if TYPE_CHECKING:
    from roll.tracking import Summary

__all__ = ["CommandState", "roll"]


@dataclass
class CommandState:
    """State of a command that `main` reports if the command fails or is interrupted."""

    run_dir: Path | None = None
    own_process: bool = False
    """True if this process runs only the command, so that the command may change global state."""


_overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
_file_argument = click.argument("file", metavar="FILE", shell_complete=complete_files)
_pipeline_option = click.option(
    "--pipeline", metavar="NAME", default="rlvr", show_default=True, help="Name of the pipeline."
)


def _compute_exit_code(summary: Summary) -> int:
    """Return the exit code of a completed run; if no step updated the weights, print a message and return 1."""
    if summary.problem:
        click.echo(f"Error: {summary.problem}", err=True)
    return 1 if summary.problem else 0


def _print_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from roll.version import __version__

        click.echo(f"roll {__version__}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def roll() -> None:
    """Train language models with reinforcement learning.

    \b
    roll init work                                              start a new run in ./work
    roll check examples/quickstart.yaml                         check a run before it starts
    roll train examples/quickstart.yaml                         train
    roll train examples/quickstart.yaml training.num_steps=20   train with an override
    roll resume runs/quickstart                                 continue after an interruption
    roll replay runs/quickstart                                 train again on the recorded batches
    roll view runs/quickstart                                   browse the rollouts
    roll chat runs/quickstart                                   chat with the trained model
    """


@roll.command()
@_file_argument
@_overrides_argument
@click.pass_obj
def train(state: CommandState, file: str, overrides: tuple[str, ...]) -> int:
    """Train with the configuration in FILE.

    Override values with KEY=VALUE, for example training.learning_rate=2e-5 or data.0.max_operand=20;
    `roll config explain` lists the keys.
    """
    from roll.config.load import load_config

    config = load_config(file, overrides)
    from roll.api import train as start  # after the configuration, so that a misspelt key is refused at once

    state.run_dir = config.run_dir
    return _compute_exit_code(start(config))


@roll.command()
@click.argument("run", metavar="RUN", shell_complete=complete_directories)
@_overrides_argument
@click.pass_obj
def resume(state: CommandState, run: str, overrides: tuple[str, ...]) -> int:
    """Continue a run from its newest checkpoint.

    RUN is the run directory, such as runs/quickstart. Overrides may change the number of steps, trainer ranks and
    engines, for example training.num_steps=80.
    """
    from roll.api import resume as start

    state.run_dir = Path(run)
    return _compute_exit_code(start(run, overrides))


@roll.command()
@click.argument("run", metavar="RUN", shell_complete=complete_directories)
@_overrides_argument
@click.option("--only", type=click.Choice(["train", "rollout"]), default="train", help="Part of the run to replay.")
@click.option("--checkpoint", metavar="PATH", help="Start from this checkpoint: RUN/checkpoints/step-N.")
@click.pass_obj
def replay(state: CommandState, run: str, overrides: tuple[str, ...], only: str, checkpoint: str | None) -> int:
    """Replay the recorded run RUN in a new run directory.

    \b
    roll replay runs/x                                    train on the recorded batches, without engines
    roll replay runs/x name=x-gspo algorithm.type=gspo    train on the recorded batches with another algorithm
    roll replay runs/x --only rollout                     generate and score the same prompts, without a trainer

    RUN must have been trained with tracking.record_rollouts=true. Without overrides, training reproduces the same
    metrics and weights.
    """
    from roll.api import train as start
    from roll.pipelines.recording.configuration import load_replay_config

    chosen: Literal["train", "rollout"] = "train" if only == "train" else "rollout"
    config = load_replay_config(run, overrides, only=chosen, checkpoint=checkpoint)
    state.run_dir = config.run_dir
    return _compute_exit_code(start(config))


@roll.command()
@_file_argument
@_overrides_argument
@click.option("--dry-run", is_flag=True, help="Also run a training step of one rank without weights and devices.")
@click.pass_obj
def check(state: CommandState, file: str, overrides: tuple[str, ...], dry_run: bool) -> None:
    """Check a run before it starts, and show the resources that it needs.

    Prints devices, memory, batch arithmetic, files, one prompt and one reward. Takes seconds and loads no weights; for
    a hub model that is not downloaded, only config.json is downloaded.

    With --dry-run, also prints the peak memory and the traffic of one trainer rank in a step, under the configured
    layout. This takes seconds per billion parameters, for any number of ranks.

    Exits with code 2 if the run cannot start.
    """
    from roll.config.load import load_config

    config = load_config(file, overrides)
    from roll.api import check_loaded  # after the configuration, so that a misspelt key is refused at once
    from roll.errors import UserError
    from roll.preflight.inspection import needs_torch
    from roll.process_environment import prepare_environment

    prepare_environment()
    # Importing torch takes seconds. Libraries that import torch if it is installed, such as transformers, get an
    # ImportError.
    if state.own_process and not needs_torch(config):
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    report = check_loaded(config)
    if dry_run:
        from roll.preflight.inspection import run_checks
        from roll.preflight.layout import dry_run_step

        run_checks(report, config, partial(dry_run_step, report_progress=partial(click.echo, err=True)))
    click.echo(str(report))
    if report.problems:
        raise UserError("\n".join(["the run cannot start:", *(f"  {problem}" for problem in report.problems)]))


@roll.command(name="eval")
@_file_argument
@_overrides_argument
@click.option("--model", metavar="PATH", help="Model, run or checkpoint to evaluate instead of FILE's model.")
def evaluate(file: str, overrides: tuple[str, ...], model: str | None) -> int:
    """Evaluate a model on the held-out prompts of FILE.

    Prints one JSON object, and nothing else, to standard output. Exits with code 1 if there were no answers.
    """
    import json

    from roll.api import evaluate as measure

    found = measure(file, overrides, model=model)
    click.echo(json.dumps(found, indent=2))
    if found.get("eval/num_answers") != 0:  # absent if a pipeline measures examples only
        return 0
    click.echo("Error: no answers were generated, so there are no metrics.", err=True)
    return 1


@roll.command()
@click.argument("file", metavar="[FILE]", required=False, shell_complete=complete_files)
@_overrides_argument
@click.option("--calibrate", metavar="RUN", help="Fit the performance models to RUN instead; writes RUN/calibration/.")
@click.option("--variant", "-v", multiple=True, metavar="NAME", help="Simulate only this variant; may be repeated.")
@click.option("--trace/--no-trace", default=True, help="Write traces of the first seed for ui.perfetto.dev.")
def simulate(
    file: str | None, overrides: tuple[str, ...], calibrate: str | None, variant: tuple[str, ...], trace: bool
) -> None:
    """Simulate a run on other hardware, in virtual time.

    ROLL's schedulers run with performance models of the hardware that FILE describes. Prints a table of the variants in
    FILE and writes results, a plot and traces. The same FILE, seed and version of ROLL always produce the same
    result.

    With --calibrate RUN, FILE is omitted: the performance models of engine, trainer and sync are fitted to the records
    of RUN and written to RUN/calibration/workload.yaml, which is a FILE that describes RUN.
    """
    if calibrate is not None:
        from roll.simulation.calibrate import calibrate as start
        from roll.simulation.calibrate import render_calibration

        if file is not None:
            raise click.UsageError(f"--calibrate RUN cannot be combined with FILE: remove '{file}'.")
        found = start(calibrate)
        click.echo(render_calibration(found))
        click.echo("")
        for path in found.paths:
            click.echo(path)
        return
    if file is None:
        raise click.UsageError("specify a FILE to simulate, or --calibrate RUN.")
    from roll.config.simulation import load_simulation
    from roll.simulation.report import render_results, simulate_variants, write_results

    config = load_simulation(file, overrides)
    results = simulate_variants(
        config, variant_names=variant, trace=trace, progress=lambda line: click.echo(line, err=True)
    )
    click.echo(render_results(results))
    click.echo("")
    for path in write_results(results, Path(config.output_dir) / config.name):
        click.echo(path)


@roll.command()
@click.argument("source", metavar="FILE|MODEL", shell_complete=complete_files)
@click.option("--device", "device_name", metavar="NAME", help="Device to plan for: h100, h200, a100, ..., cpu.")
@click.option("--devices", "num_devices", type=int, metavar="N", help="Total number of devices for all roles.")
@_overrides_argument
def plan(source: str, device_name: str | None, num_devices: int | None, overrides: tuple[str, ...]) -> None:
    """Plan a run: find the fastest assignment of devices to roles.

    FILE is a run's configuration or a workload for `roll simulate`; MODEL is a config.json, a model directory, a Hub ID
    (owner/name; only config.json is downloaded) or a name from the catalog, dense or MoE.

    Prints the fastest plan that fits in memory: tensor parallelism of the engines, devices for training and for
    generation, async ratio, expert parallelism, memory of each role, expected step time and bottleneck. The plan states
    whether asynchrony helps, and which numbers are measured and which are assumed.
    """
    from roll.simulation.plan_report import render_plan
    from roll.simulation.plan_sources import read_plan_source
    from roll.simulation.planner import make_plan
    from roll.simulation.training_plan import render_training_plan

    found = read_plan_source(source, overrides, device_name=device_name, num_devices=num_devices)
    if found.examples_per_step is not None:
        click.echo(render_training_plan(found))
        return
    best = make_plan(found.config, lambda line: click.echo(line, err=True), found.trainer)
    click.echo(render_plan(best, found.constants))


@roll.command()
@click.argument("source", metavar="RUN|CHECKPOINT", shell_complete=complete_directories)
@click.argument("target", metavar="DIR", shell_complete=complete_directories)
@click.option("--adapter", is_flag=True, help="Write the LoRA adapter for peft instead of the merged model.")
@click.option("--to-hub", "repository", metavar="OWNER/NAME", help="Upload DIR to this Hugging Face repository.")
@click.option("--public", is_flag=True, help="Create the repository of --to-hub as a public repository.")
def export(source: str, target: str, adapter: bool, repository: str | None, public: bool) -> None:
    """Write a trained model to DIR as Hugging Face safetensors, with a model card.

    Nothing is uploaded without --to-hub; a repository that --to-hub creates is private unless --public is set.
    """
    if public and repository is None:
        raise click.UsageError("--public requires --to-hub OWNER/NAME.")
    from roll.api import export as start

    click.echo(start(source, target, adapter=adapter, to_hub=repository, public=public))


@roll.command()
@click.argument("runs", metavar="[RUNS]...", nargs=-1)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=7265,
    show_default=True,
    help="Port to listen on; 0 selects a free port.",
)
@click.option(
    "--token", help="Access token for the page; by default generated if HOST is reachable from other machines."
)
@click.option("--open/--no-open", "open_browser", default=False, help="Open the page in a browser.")
def dashboard(runs: tuple[str, ...], host: str, port: int, token: str | None, open_browser: bool) -> None:
    """Inspect runs in a browser: metrics, rollouts, tokens, time and health.

    RUNS are run directories or parent directories of runs; by default runs/. Only the files of the runs are read, so a
    run may be training or finished.
    """
    from roll.dashboard.serving import serve
    from roll.errors import RunDirectoryError
    from roll.tracking.run_directory import describe_missing_run

    for run in runs:
        if not Path(run).exists():
            raise RunDirectoryError(describe_missing_run(Path(run)))
    if not runs and not Path("runs").exists():
        click.echo(f"'{Path('runs').absolute()}' does not exist yet: runs appear on the page when they start.")
    serve([Path(run) for run in runs or ("runs",)], host, port, token, open_browser=open_browser, notify=click.echo)


for command in (env, view, chat, compare, doctor, sandbox, init, reward, serve):
    roll.add_command(command)


@roll.group()
def config() -> None:
    """Print and explain configurations."""


@config.command()
@_file_argument
@_overrides_argument
def show(file: str, overrides: tuple[str, ...]) -> None:
    """Print the resolved configuration of FILE and the overrides, with all defaults."""
    from roll.config.load import dump_yaml, load_config

    click.echo(dump_yaml(load_config(file, overrides)), nl=False)


@config.command(name="explain")
@click.argument("key", required=False, default="")
@_pipeline_option
def explain_command(key: str, pipeline: str) -> None:
    """Explain the meaning, type, unit and default of KEY. Without KEY, list the sections."""
    from roll.config.explain import explain

    click.echo(explain(key, pipeline))


@config.command()
@_pipeline_option
def schema(pipeline: str) -> None:
    """Print the JSON Schema of configuration files for editors."""
    import json

    from roll.config.schema import build_json_schema

    click.echo(json.dumps(build_json_schema(pipeline), indent=2, ensure_ascii=False))


config.add_command(from_trl)
config.add_command(from_verl)
