"""`roll reward`: test rewards on files of answers, and serve them over HTTP."""

from __future__ import annotations

import click

from roll.cli.completion import complete_files

__all__ = ["reward"]


@click.group()
def reward() -> None:
    """Test rewards, and serve them over HTTP."""


@reward.command(name="test")
@click.argument("file", metavar="FILE", shell_complete=complete_files)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--config", "-c", metavar="CFG", help="Configuration with the rewards, selected by the `domain` of each line."
)
@click.option(
    "--reward",
    "-r",
    "reward_texts",
    multiple=True,
    metavar="TYPE",
    help="Reward to use: math, or {type: math, …}; repeatable.",
)
@click.option(
    "--jobs", "-j", type=click.IntRange(min=1), help="Number of answers to score in parallel; by default one per core."
)
@click.option("--limit", type=click.IntRange(min=1), help="Score only the first N answers.", metavar="N")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line instead of a table.")
def run_reward_test(
    file: str,
    overrides: tuple[str, ...],
    config: str | None,
    reward_texts: tuple[str, ...],
    jobs: int | None,
    limit: int | None,
    as_json: bool,
) -> int:
    """Score the answers in FILE, which has one JSON object per line.

    \b
    {"response": "The answer is 7.", "answer": "7"}
    {"response": "8", "answer": "7", "expected": false}

    A line may also have prompt, metadata, finished, domain, and expected (true, false or a value). Exits with code 1 if
    an answer could not be scored or its score is not the expected one, with code 2 if a line is malformed.
    """
    from roll.cli.score_file import score_file

    return score_file(file, config, overrides, reward_texts, jobs=jobs, limit=limit, as_json=as_json)


@reward.command()
@click.argument("target", metavar="TARGET", shell_complete=complete_files)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8600,
    show_default=True,
    help="Port to listen on; 0 selects a free port.",
)
@click.option("--token-env", metavar="NAME", help="Environment variable with the bearer token that clients must send.")
@click.option(
    "--workers",
    "-j",
    type=click.IntRange(min=1),
    help="Number of worker processes; by default one per core.",
    metavar="N",
)
@click.option(
    "--max-pending",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Maximum number of pending answers; further requests get status 503.",
    metavar="N",
)
@click.option(
    "--drain",
    "drain_s",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds to wait for running requests after SIGTERM or Ctrl-C.",
)
def serve(
    target: str,
    overrides: tuple[str, ...],
    host: str,
    port: int,
    token_env: str | None,
    workers: int | None,
    max_pending: int,
    drain_s: float,
) -> None:
    """Serve rewards over HTTP, for rewards of type `remote`, until SIGTERM or Ctrl-C.

    \b
    roll reward serve rewards.py:score         your own function
    roll reward serve examples/gsm8k.yaml      the rewards of a configuration, by domain
    roll reward serve math                     a type of reward
    roll reward serve '{type: choice, letters: ABCD}'

    The rewards run in worker processes, with the same time limits and results as in a run. docs/rewards.md describes
    the protocol.
    """
    from roll.cli.reward_service import ServiceSettings, serve_rewards

    settings = ServiceSettings(
        host=host, port=port, token_env=token_env, num_workers=workers, max_pending=max_pending, drain_s=drain_s
    )
    serve_rewards(target, overrides, settings)
