"""The commands. Each imports its dependencies when it runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from roll.cli.completing import directories, files
from roll.cli.doctor import doctor
from roll.cli.environments import env
from roll.cli.init import init
from roll.cli.looking import chat, compare, view
from roll.cli.migration.command import from_trl, from_verl
from roll_sandbox.cli import sandbox

if TYPE_CHECKING:
    from roll.tracking import Summary

__all__ = ["Session", "roll"]


@dataclass
class Session:
    """What `main` needs to know about a command that failed or was interrupted."""

    run_dir: Path | None = None
    own_process: bool = False
    """Whether this process runs only the command, so that a command may affect global state."""


_overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
_file = click.argument("file", metavar="FILE", shell_complete=files)
_pipeline = click.option("--pipeline", metavar="NAME", default="rlvr", show_default=True, help="Of this pipeline.")


def _ended(summary: Summary) -> int:
    """Return the exit code of a completed run: 1, with a message, if it did nothing."""
    if summary.problem:
        click.echo(f"Error: {summary.problem}", err=True)
    return 1 if summary.problem else 0


def _version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from roll.version import __version__

        click.echo(f"roll {__version__}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def roll() -> None:
    """Train language models with reinforcement learning.

    \b
    roll init work                                              start a new run in ./work
    roll check examples/quickstart.yaml                         look before you train
    roll train examples/quickstart.yaml                         train
    roll train examples/quickstart.yaml training.num_steps=20   train with another value
    roll resume runs/quickstart                                 continue after an interruption
    roll replay runs/quickstart                                 train again on what it recorded
    roll view runs/quickstart                                   read its rollouts
    roll chat runs/quickstart                                   talk to what was trained
    """


@roll.command()
@_file
@_overrides
@click.pass_obj
def train(session: Session, file: str, overrides: tuple[str, ...]) -> int:
    """Train the model that FILE configures.

    Change values with KEY=VALUE, for example training.learning_rate=2e-5 or data.0.max_operand=20;
    `roll config explain` lists the keys.
    """
    from roll.api import train as start
    from roll.config.load import load_config

    config = load_config(file, overrides)
    session.run_dir = config.run_dir
    return _ended(start(config))


@roll.command()
@click.argument("run", metavar="RUN", shell_complete=directories)
@_overrides
@click.pass_obj
def resume(session: Session, run: str, overrides: tuple[str, ...]) -> int:
    """Continue the run RUN from its newest checkpoint.

    RUN is its directory, such as runs/quickstart. The number of steps, trainer ranks and engines may change, for
    example training.num_steps=80.
    """
    from roll.api import resume as start

    session.run_dir = Path(run)
    return _ended(start(run, overrides))


@roll.command()
@click.argument("run", metavar="RUN", shell_complete=directories)
@_overrides
@click.option("--only", type=click.Choice(["train", "rollout"]), default="train", help="What to repeat.")
@click.option("--checkpoint", metavar="PATH", help="Start from this checkpoint: RUN/checkpoints/step-N.")
@click.pass_obj
def replay(session: Session, run: str, overrides: tuple[str, ...], only: str, checkpoint: str | None) -> int:
    """Repeat the recorded run RUN, in a new run directory.

    \b
    roll replay runs/x                                    train on the recorded batches, with no engine
    roll replay runs/x name=x-gspo algorithm.type=gspo    … with another algorithm
    roll replay runs/x --only rollout                     answer and score the same prompts, with no trainer

    RUN must have been trained with tracking.record_rollouts=true. Repeated without changes, training gives the same
    metrics and weights.
    """
    from roll.api import train as start
    from roll.pipelines.recording.configuration import load_replay_config

    chosen: Literal["train", "rollout"] = "train" if only == "train" else "rollout"
    config = load_replay_config(run, overrides, only=chosen, checkpoint=checkpoint)
    session.run_dir = config.run_dir
    return _ended(start(config))


@roll.command()
@_file
@_overrides
@click.option("--dry-run", is_flag=True, help="Also try a step of the trainer's ranks, without weights or devices.")
@click.pass_obj
def check(session: Session, file: str, overrides: tuple[str, ...], dry_run: bool) -> None:
    """Check a run before it starts, and show what it needs.

    Prints devices, memory, batch arithmetic, files, one prompt and one reward. Takes seconds and loads no weights; of a
    hub model that is not here it fetches config.json.
    With --dry-run also what a rank of the trainer, under its layout, holds at most and sends in a step: seconds for
    each billion parameters, on this machine, however many ranks there are.
    Exits with code 2 if the run could not start.
    """
    from roll.config.load import load_config
    from roll.errors import UserError
    from roll.extensions import names_own_code
    from roll.pipelines.registry import CHECKS
    from roll.process_environment import prepare_environment

    config = load_config(file, overrides)
    prepare_environment()
    their_code = config.model.trust_remote_code or names_own_code(config.model_dump())
    if session.own_process and not their_code:  # loading torch takes seconds; only the user's code may need it
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # an import of it raises ImportError
    report = CHECKS.get(config.pipeline)(config)
    if dry_run:
        from roll.preflight.inspection import run_checks
        from roll.preflight.layout import try_a_step

        run_checks(report, config, partial(try_a_step, say=partial(click.echo, err=True)))
    click.echo(str(report))
    if report.problems:
        raise UserError("\n".join(["this run cannot start:", *(f"  {problem}" for problem in report.problems)]))


@roll.command(name="eval")
@_file
@_overrides
@click.option("--model", metavar="PATH", help="Evaluate this model, run or checkpoint instead of FILE's model.")
def evaluate(file: str, overrides: tuple[str, ...], model: str | None) -> int:
    """Measure a model on the held-out prompts of FILE.

    Prints one JSON object, and nothing else, to standard output. Exits with code 1 where there were no answers.
    """
    import json

    from roll.api import evaluate as measure

    found = measure(file, overrides, model=model)
    click.echo(json.dumps(found, indent=2))
    if found.get("eval/num_answers") != 0:  # absent if a pipeline measures examples only
        return 0
    click.echo("Error: no answers: nothing was measured.", err=True)
    return 1


@roll.command()
@click.argument("file", metavar="[FILE]", required=False, shell_complete=files)
@_overrides
@click.option("--calibrate", metavar="RUN", help="Fit the models to a real run instead; writes RUN/calibration/.")
@click.option("--variant", "-v", multiple=True, metavar="NAME", help="Simulate only this variant; may be repeated.")
@click.option("--trace/--no-trace", default=True, help="Write traces of the first seed, for ui.perfetto.dev.")
def simulate(
    file: str | None, overrides: tuple[str, ...], calibrate: str | None, variant: tuple[str, ...], trace: bool
) -> None:
    """Simulate a run on other hardware, in virtual time.

    ROLL's own schedulers run against models of the hardware that FILE describes. Prints a table of the variants in
    FILE and writes results, a plot and traces. The same FILE, seed and version of
    ROLL always give the same result. With --calibrate RUN, leave FILE out: the models of engine, trainer and sync are
    fitted to what RUN recorded, and RUN/calibration/workload.yaml becomes a FILE that describes RUN.
    """
    if calibrate is not None:
        from roll.simulation.calibrate import calibrate as start
        from roll.simulation.calibrate import render_calibration

        if file is not None:
            raise click.UsageError(f"--calibrate needs only its RUN: leave '{file}' out.")
        found = start(calibrate)
        click.echo(render_calibration(found))
        click.echo("")
        for path in found.paths:
            click.echo(path)
        return
    if file is None:
        raise click.UsageError("give a FILE to simulate, or --calibrate RUN.")
    from roll.config.simulation import load_simulation
    from roll.simulation.report import render, study, write

    config = load_simulation(file, overrides)
    results = study(config, only=variant, trace=trace, progress=lambda line: click.echo(line, err=True))
    click.echo(render(results))
    click.echo("")
    for path in write(results, Path(config.output_dir) / config.name):
        click.echo(path)


@roll.command()
@click.argument("source", metavar="FILE|MODEL", shell_complete=files)
@click.option("--device", "device_name", metavar="NAME", help="Device to plan for: h100, h200, a100, ..., cpu.")
@click.option("--devices", "num_devices", type=int, metavar="N", help="Number of devices, for all roles together.")
@_overrides
def plan(source: str, device_name: str | None, num_devices: int | None, overrides: tuple[str, ...]) -> None:
    """Plan a run: find the fastest way to divide the devices.

    FILE is a run's configuration or a workload for `roll simulate`; MODEL is a config.json, a model directory, a hub id
    (owner/name; only its config.json is needed) or a known name, dense or a mixture of experts.

    Prints the fastest plan that fits in memory: how wide each engine is, which devices train and which generate, the
    async ratio, expert parallelism, the memory of each role, the expected step time and what limits it. Says so if
    asynchrony does not help, and which numbers were measured and which are assumed.
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
@click.argument("source", metavar="RUN|CHECKPOINT", shell_complete=directories)
@click.argument("target", metavar="DIR", shell_complete=directories)
@click.option("--adapter", is_flag=True, help="Write the LoRA adapter for peft instead of the merged model.")
@click.option("--to-hub", "repository", metavar="OWNER/NAME", help="Then upload DIR to the Hugging Face hub.")
@click.option("--public", is_flag=True, help="Let everybody see a repository that --to-hub makes.")
def export(source: str, target: str, adapter: bool, repository: str | None, public: bool) -> None:
    """Write a trained model to DIR, as Hugging Face safetensors, with a model card.

    Nothing is uploaded without --to-hub; a repository that it makes is private unless --public is given.
    """
    if public and repository is None:
        raise click.UsageError("--public says who sees what --to-hub uploads: give --to-hub OWNER/NAME.")
    from roll.api import export as start

    click.echo(start(source, target, adapter=adapter, to_hub=repository, public=public))


@roll.command()
@click.argument("runs", metavar="[RUNS]...", nargs=-1)
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen at this address.")
@click.option("--port", type=click.IntRange(0, 65535), default=7265, show_default=True, help="0 takes a free one.")
@click.option("--token", help="Answer only who has it; made and printed for a HOST that others can reach.")
@click.option("--open/--no-open", "open_browser", default=False, help="Open the page in a browser.")
def dashboard(runs: tuple[str, ...], host: str, port: int, token: str | None, open_browser: bool) -> None:
    """Look into runs in a browser: curves, rollouts, tokens, time, health.

    RUNS are run directories, or directories that hold some; by default runs/. Works while a run trains and after it,
    and reads only its directory.
    """
    from roll.dashboard.serving import serve
    from roll.errors import RunDirectoryError
    from roll.tracking.run_directory import no_run

    for run in runs:
        if not Path(run).exists():
            raise RunDirectoryError(no_run(Path(run)))
    if not runs and not Path("runs").exists():
        click.echo(f"'{Path('runs').absolute()}' is not there yet: runs appear on the page once they begin.")
    serve([Path(run) for run in runs or ("runs",)], host, port, token, open_browser=open_browser, say=click.echo)


@roll.group()
def reward() -> None:
    """Try out rewards."""


@reward.command(name="test")
@_file
@_overrides
@click.option("--config", "-c", metavar="CFG", help="Use this configuration's rewards, chosen by each line's `domain`.")
@click.option(
    "--reward", "-r", "named", multiple=True, metavar="TYPE", help="Use this reward: math, or {type: math, …}."
)
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Answers to score at once; one per core by default.")
@click.option("--limit", type=click.IntRange(min=1), help="Score only the first N answers.", metavar="N")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line instead of a table.")
def reward_test(
    file: str,
    overrides: tuple[str, ...],
    config: str | None,
    named: tuple[str, ...],
    jobs: int | None,
    limit: int | None,
    as_json: bool,
) -> int:
    """Score the answers in FILE, which holds one JSON object per line.

    \b
    {"response": "The answer is 7.", "answer": "7"}
    {"response": "8", "answer": "7", "expected": false}

    A line may also have prompt, metadata, finished, domain, and expected (true, false or a value). Exits with code 1 if
    an answer could not be scored or did not score as expected, with 2 if something is malformed.
    """
    from roll.cli.score_file import score_file

    return score_file(file, config, overrides, named, jobs=jobs, limit=limit, as_json=as_json)


for command in (env, view, chat, compare, doctor, sandbox, init):
    roll.add_command(command)


@roll.group()
def config() -> None:
    """Print and explain configurations."""


@config.command()
@_file
@_overrides
def show(file: str, overrides: tuple[str, ...]) -> None:
    """Print the complete configuration that FILE and the overrides give, defaults included."""
    from roll.config.load import dump_yaml, load_config

    click.echo(dump_yaml(load_config(file, overrides)), nl=False)


@config.command(name="explain")
@click.argument("key", required=False, default="")
@_pipeline
def explain_(key: str, pipeline: str) -> None:
    """Explain KEY: its meaning, type, unit and default. Without KEY, list the sections."""
    from roll.config.explain import explain

    click.echo(explain(key, pipeline))


@config.command()
@_pipeline
def schema(pipeline: str) -> None:
    """Print the JSON Schema of configuration files, for editors."""
    import json

    from roll.config.schema import json_schema

    click.echo(json.dumps(json_schema(pipeline), indent=2, ensure_ascii=False))


config.add_command(from_trl)
config.add_command(from_verl)
