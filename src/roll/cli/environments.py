"""`roll env`: list, play, roll out, check and serve environments. Each command imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from roll.envs.transcripts import Transcript

__all__ = ["env"]

_id_argument = click.argument("id", metavar="ID")
_options_argument = click.argument("options", nargs=-1, metavar="[KEY=VALUE]...")
_seed_option = click.option("--seed", type=int, default=0, show_default=True, help="Seed of the first episode.")
_html_option = click.option("--html", "html_file", metavar="FILE", help="Also write the episodes to an HTML page.")
_text_option = click.option("--text", "text_file", metavar="FILE", help="Also write the episodes to a text file.")
_demonstrations_option = click.option(
    "--demonstrations",
    "demonstrations_file",
    metavar="FILE",
    help="Also append multi-turn episodes with a reward of at least 1 to a file for `anchors.demonstrations`.",
)


@click.group()
def env() -> None:
    """List, play, check and serve environments.

    ID is a name from `roll env list` or your own class: mazes.py:Maze or my_package.mazes:Maze. KEY=VALUE sets an
    argument of the environment.
    """


@env.command(name="list")
@click.argument("containing", required=False, default="")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def list_environments(containing: str, as_json: bool) -> None:
    """List the shipped environments with their arguments, or only those with CONTAINING in their names."""
    import json

    from roll.envs.registration import ADAPTER_PATHS, ENVS
    from roll.errors import ConfigError
    from roll.registry import did_you_mean

    found = [spec for name, spec in sorted(ENVS.items()) if containing.lower() in name.lower()]
    families = [item for item in sorted(ADAPTER_PATHS.items()) if containing.lower() in item[0]]
    if not (found or families):
        words = {word for name in [*ENVS, *ADAPTER_PATHS] for word in name.lower().replace(":", "-").split("-")}
        raise ConfigError(
            f"no environment name contains '{containing}'.{did_you_mean(containing.lower(), sorted(words))}"
        )
    width = max((len(spec.id) for spec in found), default=0)
    for spec in found:
        if as_json:
            click.echo(json.dumps({"id": spec.id, "entry_point": str(spec.entry_point), "options": dict(spec.options)}))
        else:
            click.echo(
                f"{spec.id:{width}}  {', '.join(f'{key}={value}' for key, value in spec.options.items())}".rstrip()
            )
    if not as_json:
        for family, entry_point in families:
            click.echo(f"{family}:NAME  by {entry_point.partition(':')[0]}")
        click.echo("Custom environments: file.py:Class or package.module:Class.")


@env.command()
@_id_argument
@_options_argument
@_seed_option
@_html_option
@_text_option
@_demonstrations_option
def play(
    id: str,
    options: tuple[str, ...],
    seed: int,
    html_file: str | None,
    text_file: str | None,
    demonstrations_file: str | None,
) -> None:
    """Play the environment ID in the terminal.

    If the environment expects \\boxed{} around an answer, type only the content. An empty line plays a random action;
    Ctrl-D quits.
    """
    from roll.cli.play import build_human_policy, play_one_episode
    from roll.running import run_to_end
    from roll.tracking.escape import escape_controls
    from roll.types import describe_content

    played = run_to_end(play_one_episode(id, _parse_settings(options), seed, 10_000, build_human_policy))
    if played.terminated or played.truncated:
        click.echo(escape_controls(describe_content(played.turns[-1].observation)))
    click.echo(f"═══ {played.ending} after {len(played.turns)} turns, rewards {played.total:g}")
    _write_transcripts([played], id, html_file, text_file, demonstrations_file)


@env.command()
@_id_argument
@_options_argument
@_seed_option
@click.option(
    "--policy",
    type=click.Choice(["random", "model", "openai"]),
    default="random",
    show_default=True,
    help="Policy: random actions, a local model, or an OpenAI-compatible server.",
)
@click.option(
    "--episodes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of episodes, with consecutive seeds.",
)
@click.option(
    "--turns", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of turns of an episode."
)
@click.option(
    "--model", metavar="NAME", help="Path or name of the model; for --policy openai, the server's model name."
)
@click.option("--url", metavar="URL", help="Base URL for --policy openai, such as http://localhost:8000/v1.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Maximum number of tokens of an answer.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Sampling temperature of the model.",
)
@click.option("--quiet", is_flag=True, help="Print only the summary.")
@click.option(
    "--tool",
    "tools",
    multiple=True,
    metavar="TOOL",
    help="Tool for the policy: calculator, '{tool: search, folder: notes}' or tools.py:lookup; may be repeated.",
)
@click.option("--tool-format", "--form", "tool_format", default="auto", show_default=True, help="Format of tool calls.")
@_html_option
@_text_option
@_demonstrations_option
def rollout(
    id: str,
    options: tuple[str, ...],
    seed: int,
    policy: Literal["random", "model", "openai"],
    episodes: int,
    turns: int,
    model: str | None,
    url: str | None,
    max_new_tokens: int,
    temperature: float,
    quiet: bool,
    tools: tuple[str, ...],
    tool_format: str,
    html_file: str | None,
    text_file: str | None,
    demonstrations_file: str | None,
) -> None:
    """Play episodes of the environment ID with a policy, and show them.

    \b
    roll env rollout game:Sokoban-v0-easy --html sokoban.html
    roll env rollout game:Wordle-v0-easy --policy model --model smollm2-135m-instruct
    roll env rollout mazes.py:Maze size=5 --policy openai --url http://localhost:8000/v1 --model mine
    roll env rollout math:Generated-v0-hard --policy model --model smollm2-135m-instruct --tool calculator

    The API key of an OpenAI-compatible server is read from OPENAI_API_KEY.
    """
    from roll.cli.play import PlayerSettings, play_episodes
    from roll.envs.transcripts import render_text
    from roll.running import run_to_end

    sampling = PlayerSettings(model=model, url=url, max_new_tokens=max_new_tokens, temperature=temperature)
    seeds = range(seed, seed + episodes)
    work = play_episodes(
        id, _parse_settings(options), policy, sampling, seeds, turns, [_parse_tool(tool) for tool in tools], tool_format
    )
    played = run_to_end(work)
    if not quiet:
        for each in played:
            click.echo(render_text(each))
    totals = sorted(each.total for each in played)
    click.echo(
        f"{len(played)} episode(s): mean reward {sum(totals) / len(totals):.3f}, from {totals[0]:g} to "
        f"{totals[-1]:g}; {sum(len(each.turns) for each in played) / len(played):.1f} turns on average."
    )
    _write_transcripts(played, id, html_file, text_file, demonstrations_file)


@env.command()
@click.argument("id", metavar="ID|FILE")
@_options_argument
@click.option(
    "--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Number of episodes for each rule."
)
def check(id: str, options: tuple[str, ...], seeds: int) -> int:
    """Check that the environment ID, or every environment in FILE, follows the protocol.

    Prints each violated rule with advice. Exits with code 1 if a violation would affect training.
    """
    from roll.envs.conformance import check as find

    broken = False
    for name in _find_environments(id) if id.endswith(".py") else [id]:
        findings = find(name, _parse_settings(options), num_seeds=seeds)
        for finding in findings:
            click.echo(f"{name}: {finding}")
        fatal = sum(finding.fatal for finding in findings)
        broken = broken or fatal > 0
        click.echo(f"{name}: {'follows the protocol' if not fatal else f'violates {fatal} rule(s)'}.")
    return 1 if broken else 0


@env.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; any client that reaches this address can use the environments.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8500,
    show_default=True,
    help="Port to listen on; 0 selects a free port.",
)
def serve(ids: tuple[str, ...], host: str, port: int) -> None:
    """Serve the shipped environments, and your own (ID), to runs with `host: http`, until Ctrl-C."""
    from roll.cluster.pool import LocalWorkerPool
    from roll.config.sandbox import SandboxConfig
    from roll.envs.registration import ENVS, find
    from roll.envs.run_hosts import open_hosts
    from roll.envs.server import serve_environments
    from roll.errors import ConfigError
    from roll.running import run_to_end

    for name in ids:
        find(name)

    async def run_server() -> None:
        import asyncio

        pool = LocalWorkerPool(1)
        try:
            async with (
                open_hosts(pool, SandboxConfig()) as hosts,
                serve_environments(hosts, {*ENVS, *ids}, host=host, port=port) as url,
            ):
                click.echo(f"serving {len({*ENVS, *ids})} environments at {url}; {url}/environments lists them.")
                await asyncio.Event().wait()
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {error}. Choose another --port.") from error
        finally:
            await pool.close()

    run_to_end(run_server())


def _find_environments(file: str) -> list[str]:
    """Return the names of the classes in a file that have a method `reset` or `step`."""
    import ast

    from roll.errors import ConfigError

    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"'{file}' cannot be read: {error}.") from error
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
            if methods & {"reset", "step"}:
                found.append(f"{file}:{node.name}")
    if not found:
        raise ConfigError(f"'{file}' has no class with `reset` or `step`: specify a class as {file}:Class.")
    return found


def _parse_settings(options: Sequence[str]) -> dict[str, Any]:
    """Parse arguments of the form `key=value` into a dictionary; each value is parsed as YAML."""
    settings = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier():
            raise click.UsageError(f"expected KEY=VALUE, for example size=5, got '{option}'.")
        settings[key] = _parse_value(value, option)
    return settings


def _parse_tool(text: str) -> Any:
    """Parse a tool that is written in YAML, as in a configuration.

    For a user-defined tool, the entries of `options` become entries of the tool itself, next to `tool`.
    """
    entry = _parse_value(text)
    if isinstance(entry, dict) and ":" in str(entry.get("tool")) and isinstance(entry.get("options"), dict):
        return {**entry["options"], "tool": entry["tool"]}
    return entry


def _parse_value(text: str, location: str = "") -> Any:
    """Parse text as YAML; error messages quote `location` if it is given, otherwise the text."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise click.UsageError(f"'{location or text}' is not valid YAML: {str(error).splitlines()[0]}.") from None


def _write_transcripts(
    transcripts: list[Transcript],
    title: str,
    html_file: str | None,
    text_file: str | None,
    demonstrations_file: str | None,
) -> None:
    from roll.envs.transcripts import format_demonstrations, render_html, render_text

    if html_file is not None:
        Path(html_file).write_text(render_html(transcripts, title), encoding="utf-8")
        click.echo(html_file)
    if text_file is not None:
        text = "\n\n".join(map(render_text, transcripts))
        Path(text_file).write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
        click.echo(text_file)
    if demonstrations_file is not None:
        lines = format_demonstrations(transcripts)
        with Path(demonstrations_file).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        click.echo(f"{demonstrations_file}: {len(lines)} of {len(transcripts)} episode(s) added")
