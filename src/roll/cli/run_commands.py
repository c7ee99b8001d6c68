"""`roll view`, `roll chat` and `roll compare`: inspecting trained runs."""

from __future__ import annotations

from typing import Literal

import click

__all__ = ["chat", "compare", "view"]


@click.command()
@click.argument("run", metavar="RUN")
@click.option(
    "--filter", "-f", "filters", metavar="TEXT", default="", help="Show only rollouts that match this filter."
)
@click.option(
    "--sort", "-s", metavar="[-]COLUMN", default="", help="Sort by this column; prefix it with - for descending order."
)
@click.option("--plain", is_flag=True, help="Print a table instead of the full-screen view.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of rows of the table."
)
def view(run: str, filters: str, sort: str, plain: bool, limit: int) -> None:
    """Browse the rollouts of RUN in the terminal, during training or after it.

    A filter consists of conditions and words, separated by spaces; a rollout must match all of them:

    \b
    reward>0.5 step=3..7 tokens>=200     numbers: = != < <= > >= and ranges
    correct=no verdict=wrong domain=math kind=eval status=infra_error
    "the answer is"                      text that the prompt or the answer contains

    Keys: / filter, s sort, Enter open a rollout, g show the group side by side, t show the tokens, ? list all keys.
    If the output is not a terminal, a table is printed.
    """
    from roll.cli.view.show import show_rollouts

    show_rollouts(run, filters, sort, plain=plain, limit=limit)


@click.command()
@click.argument("sources", metavar="RUN|MODEL...", nargs=-1, required=True)
@click.option("--base", is_flag=True, help="Also chat with the initial model of the first RUN.")
@click.option("--system", metavar="TEXT", default="", help="System prompt.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Maximum number of tokens of an answer.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.7,
    show_default=True,
    help="Sampling temperature; 0 is greedy.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed; a seed gives reproducible answers.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Data type of the weights.",
)
def chat(
    sources: tuple[str, ...],
    base: bool,
    system: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    dtype: Literal["bfloat16", "float32"],
) -> None:
    """Chat with a trained model on this machine.

    \b
    roll chat runs/x                                            the newest checkpoint of a run
    roll chat runs/x --base                                     the newest checkpoint and the initial model
    roll chat runs/x/checkpoints/step-000020 runs/x model/dir   several models, each with its own conversation

    /help lists the commands; Ctrl-C stops an answer, Ctrl-D quits. If the input is not a terminal, each line is a
    message, and only the answers are printed.
    """
    from roll.cli.chat import SamplingOptions, chat_with_models

    options = SamplingOptions(
        system=system, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, dtype=dtype
    )
    chat_with_models(sources, options, with_base=base)


@click.command()
@click.argument("runs", metavar="RUN RUN...", nargs=-1, required=True)
@click.option(
    "--metrics", "-m", metavar="PATTERN", multiple=True, help="Pattern of metrics to compare, such as 'agreement/*'."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def compare(runs: tuple[str, ...], metrics: tuple[str, ...], as_json: bool) -> None:
    """Compare the configurations, results and durations of runs.

    Runs may be finished, interrupted or training. Metrics are means over the last five steps that all runs have.
    """
    from roll.cli.comparison import compare_runs

    click.echo(compare_runs(runs, metrics, as_json=as_json))
