"""The commands. Each imports what it needs when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

__all__ = ["Session", "roll"]


@dataclass
class Session:
    """What `main` must know of a command that failed or was interrupted."""

    run_dir: Path | None = None
    own_process: bool = False
    """Whether this process runs nothing but the command, so that a command may settle what it imports."""


_overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
_file = click.argument("file", metavar="FILE")


def _version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from roll.version import __version__

        click.echo(f"roll {__version__}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def roll() -> None:
    """Reinforcement-learning post-training of language models.

    \b
    roll check examples/quickstart.yaml                         look before training
    roll train examples/quickstart.yaml                         train
    roll train examples/quickstart.yaml training.num_steps=20   train with a changed value
    roll resume runs/quickstart                                 continue after an interruption
    roll replay runs/quickstart                                 train again on what it recorded
    """


@roll.command()
@_file
@_overrides
@click.pass_obj
def train(session: Session, file: str, overrides: tuple[str, ...]) -> None:
    """Train the model that FILE configures.

    Values are changed as KEY=VALUE, such as training.learning_rate=2e-5 or data.0.max_operand=20;
    `roll config explain` lists the keys.
    """
    from roll.api import train as start
    from roll.config.load import load_config

    config = load_config(file, overrides)
    session.run_dir = config.run_dir
    start(config)


@roll.command()
@click.argument("run", metavar="RUN")
@_overrides
@click.pass_obj
def resume(session: Session, run: str, overrides: tuple[str, ...]) -> None:
    """Continue the run in the directory RUN from its newest checkpoint.

    The number of steps, of ranks and of engines may change: training.num_steps=80.
    """
    from roll.api import resume as start

    session.run_dir = Path(run)
    start(run, overrides)


@roll.command()
@click.argument("run", metavar="RUN")
@_overrides
@click.option("--only", type=click.Choice(["train", "rollout"]), default="train", help="What is done again.")
@click.option("--checkpoint", metavar="PATH", help="Begin with it: RUN/checkpoints/step-N.")
@click.pass_obj
def replay(session: Session, run: str, overrides: tuple[str, ...], only: str, checkpoint: str | None) -> None:
    """Run the recorded run in the directory RUN again, in a run directory of its own.

    \b
    roll replay runs/x                                    train on the recorded batches, with no engine
    roll replay runs/x name=x-gspo algorithm.type=gspo    … with another algorithm
    roll replay runs/x --only rollout                     answer and score the same prompts, with no trainer

    RUN was trained with tracking.record_rollouts=true. Without changes, training gives the same metrics and weights.
    """
    from roll.api import train as start
    from roll.config.load_replay import load_replay_config

    chosen: Literal["train", "rollout"] = "train" if only == "train" else "rollout"
    config = load_replay_config(run, overrides, only=chosen, checkpoint=checkpoint)
    session.run_dir = config.run_dir
    start(config)


@roll.command()
@_file
@_overrides
@click.pass_obj
def check(session: Session, file: str, overrides: tuple[str, ...]) -> None:
    """Look before training: places, memory, batch arithmetic, files, one prompt, one reward.

    Takes seconds and loads no weights. Exit code 2 where the run could not start.
    """
    from roll.cli.check import check as start

    start(file, overrides, own_process=session.own_process)


@roll.command(name="eval")
@_file
@_overrides
@click.option("--model", metavar="PATH", help="A model, a run, or a checkpoint, instead of FILE's model.")
def evaluate(file: str, overrides: tuple[str, ...], model: str | None) -> None:
    """Measure a model on the held-out prompts of FILE; prints one JSON object."""
    import json

    from roll.config.load import load_config
    from roll.process_environment import prepare_environment

    config = load_config(file, overrides)
    prepare_environment()
    from roll import pipelines

    click.echo(json.dumps(pipelines.evaluate(config, model), indent=2))


@roll.command()
@click.argument("file", metavar="FILE", required=False)
@_overrides
@click.option("--calibrate", metavar="RUN", help="Fit the models to a real run instead; writes RUN/calibration/.")
@click.option("--variant", "-v", multiple=True, metavar="NAME", help="Only this variant; may be given several times.")
@click.option("--trace/--no-trace", default=True, help="Write traces of the first seed (ui.perfetto.dev opens them).")
def simulate(
    file: str | None, overrides: tuple[str, ...], calibrate: str | None, variant: tuple[str, ...], trace: bool
) -> None:
    """Run the schedulers on the simulated hardware of FILE, in virtual time.

    Prints a table of its variants; writes results, a plot and traces. The same FILE, seed and version of ROLL do the
    same things at the same times. With --calibrate RUN, FILE is left out: the models of engine, trainer and sync are
    fitted to what RUN recorded, and RUN/calibration/workload.yaml is a FILE that describes it.
    """
    if calibrate is not None:
        from roll.simulation.calibrate import calibrate as start
        from roll.simulation.calibrate import render_calibration

        if file is not None:
            raise click.UsageError(f"--calibrate takes everything from its RUN: leave '{file}' out.")
        found = start(calibrate)
        click.echo(render_calibration(found))
        click.echo("")
        for path in found.paths:
            click.echo(path)
        return
    if file is None:
        raise click.UsageError("give a FILE to simulate, or --calibrate RUN.")
    from roll.config.simulation import load_simulation
    from roll.simulation.report import render, write
    from roll.simulation.study import study

    config = load_simulation(file, overrides)
    results = study(config, only=variant, trace=trace, progress=lambda line: click.echo(line, err=True))
    click.echo(render(results))
    click.echo("")
    for path in write(results, Path(config.output_dir) / config.name):
        click.echo(path)


@roll.command()
@_file
@_overrides
def plan(file: str, overrides: tuple[str, ...]) -> None:
    """Plan the run of FILE's model, hardware and lengths (a file for `roll simulate`): what goes where.

    Prints the fastest plan that fits: engine width, division of the devices, async ratio, memory of each role,
    expected step time and what limits it; and says where asynchrony does not help.
    """
    from roll.config.simulation import load_simulation
    from roll.simulation.plan_report import render_plan
    from roll.simulation.planner import make_plan

    found = make_plan(load_simulation(file, overrides), progress=lambda line: click.echo(line, err=True))
    click.echo(render_plan(found))


@roll.command()
@click.argument("source", metavar="RUN|CHECKPOINT")
@click.argument("target", metavar="DIR")
def export(source: str, target: str) -> None:
    """Write the trained model to DIR, as Hugging Face safetensors that `transformers` loads."""
    from roll.process_environment import prepare_environment

    prepare_environment()
    from roll import pipelines

    click.echo(pipelines.export(Path(source), Path(target)))


@roll.group()
def reward() -> None:
    """Try rewards on answers."""


@reward.command(name="test")
@_file
@_overrides
@click.option("--config", "-c", metavar="CFG", help="Use the rewards of this configuration, by the lines' `domain`.")
@click.option("--reward", "-r", "named", multiple=True, metavar="TYPE", help="A reward: math, or {type: math, …}.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Answers scored at once; by default one per processor.")
@click.option("--limit", type=click.IntRange(min=1), help="Score only the first so many.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line instead of a table.")
def reward_test(
    file: str,
    overrides: tuple[str, ...],
    config: str | None,
    named: tuple[str, ...],
    jobs: int | None,
    limit: int | None,
    as_json: bool,
) -> int:
    """Score the answers in FILE, one JSON object a line, and print what came out.

    \b
    {"response": "The answer is 7.", "answer": "7"}
    {"response": "8", "answer": "7", "expected": false}

    A line may also have prompt, metadata, finished, domain, and expected (true, false or a value). Exit code 1 where an
    answer could not be scored or came out other than expected, 2 where something is malformed.
    """
    from roll.cli.score_file import score_file

    return score_file(file, config, overrides, named, jobs=jobs, limit=limit, as_json=as_json)


@roll.group()
def config() -> None:
    """Understand and print configurations."""


@config.command()
@_file
@_overrides
def show(file: str, overrides: tuple[str, ...]) -> None:
    """Print the whole configuration that FILE and the overrides make, defaults included."""
    from roll.config.load import dump_yaml, load_config

    click.echo(dump_yaml(load_config(file, overrides)), nl=False)


@config.command(name="explain")
@click.argument("key", required=False, default="")
def explain_(key: str) -> None:
    """Explain KEY: its meaning, form, unit and default. Without KEY, list the sections."""
    from roll.config.explain import explain

    click.echo(explain(key))


@config.command()
def schema() -> None:
    """Print the JSON Schema of configuration files, for editors."""
    import json

    from roll.config.schema import json_schema

    click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
