"""`roll view`, `roll chat` and `roll compare`: inspecting trained runs."""

from __future__ import annotations

from typing import Literal

import click

__all__ = ["chat", "compare", "view"]


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--filter", "-f", "filters", metavar="TEXT", default="", help="Show only these rollouts: see below.")
@click.option("--sort", "-s", metavar="[-]COLUMN", default="", help="Sort by this column; with - from high to low.")
@click.option("--plain", is_flag=True, help="Print a table instead of the full screen.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Rows of --plain.")
def view(run: str, filters: str, sort: str, plain: bool, limit: int) -> None:
    """Read the rollouts of RUN in the terminal, also of one that is training, also over ssh.

    A filter has conditions and words, parted by spaces; all must hold:

    \b
    reward>0.5 step=3..7 tokens>=200     numbers: = != < <= > >= and ranges
    correct=no verdict=wrong domain=math kind=eval status=infra_error
    "the answer is"                      in the prompt or the answer

    On the screen: / filters, s sorts, Enter opens a rollout, g shows its group side by side, t its tokens, ? all keys.
    Where the output is no terminal, a table is printed.
    """
    from roll.cli.viewing.show import show_rollouts

    show_rollouts(run, filters, sort, plain=plain, limit=limit)


@click.command()
@click.argument("sources", metavar="RUN|MODEL...", nargs=-1, required=True)
@click.option("--base", is_flag=True, help="Also ask the model that the first RUN began with.")
@click.option("--system", metavar="TEXT", default="", help="System prompt.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.7, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same questions get the same answers.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
def chat(
    sources: tuple[str, ...],
    base: bool,
    system: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    dtype: Literal["bfloat16", "float32"],
) -> None:
    """Talk to what was trained, on this machine.

    \b
    roll chat runs/x                                            the newest checkpoint of a run
    roll chat runs/x --base                                     next to the model that it started from
    roll chat runs/x/checkpoints/step-000020 runs/x model/dir   each with a conversation of its own

    /help lists the commands; Ctrl-C ends an answer, Ctrl-D leaves. Where the input is no
    terminal, each of its lines is a message, and only the answers are printed.
    """
    from roll.cli.chatting import SamplingOptions, talk

    manner = SamplingOptions(
        system=system, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, dtype=dtype
    )
    talk(sources, manner, with_base=base)


@click.command()
@click.argument("runs", metavar="RUN RUN...", nargs=-1, required=True)
@click.option("--metrics", "-m", metavar="PATTERN", multiple=True, help="Compare these metrics, such as 'agreement/*'.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def compare(runs: tuple[str, ...], metrics: tuple[str, ...], as_json: bool) -> None:
    """Compare runs: what their configurations differ in, what they learned, and what it cost.

    Also of runs that are training, or were interrupted. Metrics are means of the last five steps that both have.
    """
    from roll.cli.comparison import compare_runs

    click.echo(compare_runs(runs, metrics, as_json=as_json))
