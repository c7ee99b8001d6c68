"""`roll env`: list, play, roll out, check and serve environments. Each command imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from roll.envs.transcripts import Transcript

__all__ = ["env"]

_id = click.argument("id", metavar="ID")
_options = click.argument("options", nargs=-1, metavar="[KEY=VALUE]...")
_seed = click.option("--seed", type=int, default=0, show_default=True, help="Of the first episode.")
_html = click.option("--html", "html_file", metavar="FILE", help="Also write the episodes as a page.")
_text = click.option("--text", "text_file", metavar="FILE", help="Also write the episodes as text.")
_demonstrations = click.option(
    "--demonstrations",
    "demonstrations_file",
    metavar="FILE",
    help="Also add episodes of several turns that earned 1 or more to a file for `anchors.demonstrations`.",
)


@click.group()
def env() -> None:
    """See, play and check environments.

    ID is a name that `roll env list` shows, or your own class: mazes.py:Maze or my_package.mazes:Maze. KEY=VALUE are
    its arguments.
    """


@env.command(name="list")
@click.argument("containing", required=False, default="")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def list_(containing: str, as_json: bool) -> None:
    """List the environments that are shipped, with their arguments; those whose name has CONTAINING in it."""
    import json

    from roll.envs.registration import ENVS, FAMILIES
    from roll.errors import ConfigError
    from roll.registry import did_you_mean

    found = [spec for name, spec in sorted(ENVS.items()) if containing.lower() in name.lower()]
    families = [item for item in sorted(FAMILIES.items()) if containing.lower() in item[0]]
    if not (found or families):
        words = {word for name in [*ENVS, *FAMILIES] for word in name.lower().replace(":", "-").split("-")}
        raise ConfigError(
            f"no environment has '{containing}' in its name.{did_you_mean(containing.lower(), sorted(words))}"
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
        click.echo("Your own: file.py:Class or package.module:Class.")


@env.command()
@_id
@_options
@_seed
@_html
@_text
@_demonstrations
def play(
    id: str,
    options: tuple[str, ...],
    seed: int,
    html_file: str | None,
    text_file: str | None,
    demonstrations_file: str | None,
) -> None:
    """Play ID in the terminal.

    Where answers go into \\boxed{}, you type what stands in it. An empty line plays a random action; Ctrl-D leaves.
    """
    from roll.cli.playing import one_episode, person
    from roll.running import run_to_end
    from roll.tracking.visible import printable
    from roll.types import described

    played = run_to_end(one_episode(id, _settings(options), seed, 10_000, person))
    if played.terminated or played.truncated:
        click.echo(printable(described(played.turns[-1].observation)))
    click.echo(f"═══ {played.ending} after {len(played.turns)} turns, rewards {played.total:g}")
    _write([played], id, html_file, text_file, demonstrations_file)


@env.command()
@_id
@_options
@_seed
@click.option(
    "--policy", type=click.Choice(["random", "model", "openai"]), default="random", show_default=True, help="Who plays."
)
@click.option(
    "--episodes", type=click.IntRange(min=1), default=1, show_default=True, help="How many, with seeds from --seed on."
)
@click.option("--turns", type=click.IntRange(min=1), default=50, show_default=True, help="At most, of an episode.")
@click.option("--model", metavar="NAME", help="For --policy model: path or name; for openai: the server's name of it.")
@click.option("--url", metavar="URL", help="For --policy openai: such as http://localhost:8000/v1.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Of an answer.")
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Of a model.")
@click.option("--quiet", is_flag=True, help="Print the summary alone.")
@click.option(
    "--tool",
    "tools",
    multiple=True,
    metavar="TOOL",
    help="A tool for the player: calculator, '{tool: search, folder: notes}', tools.py:lookup. May be repeated.",
)
@click.option("--form", default="auto", show_default=True, help="How calls of tools are written.")
@_html
@_text
@_demonstrations
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
    form: str,
    html_file: str | None,
    text_file: str | None,
    demonstrations_file: str | None,
) -> None:
    """Have ID played, and show the episodes.

    \b
    roll env rollout game:Sokoban-v0-easy --html sokoban.html
    roll env rollout game:Wordle-v0-easy --policy model --model smollm2-135m-instruct
    roll env rollout mazes.py:Maze size=5 --policy openai --url http://localhost:8000/v1 --model mine
    roll env rollout math:Generated-v0-hard --policy model --model smollm2-135m-instruct --tool calculator

    The key of an OpenAI-compatible server is read from OPENAI_API_KEY.
    """
    from roll.cli.playing import Sampling, rollouts
    from roll.envs.transcripts import as_text
    from roll.running import run_to_end

    sampling = Sampling(model=model, url=url, max_new_tokens=max_new_tokens, temperature=temperature)
    seeds = range(seed, seed + episodes)
    work = rollouts(id, _settings(options), policy, sampling, seeds, turns, [_tool(tool) for tool in tools], form)
    played = run_to_end(work)
    if not quiet:
        for each in played:
            click.echo(as_text(each))
    totals = sorted(each.total for each in played)
    click.echo(
        f"{len(played)} episode(s): rewards {sum(totals) / len(totals):.3f} on average, from {totals[0]:g} to "
        f"{totals[-1]:g}; {sum(len(each.turns) for each in played) / len(played):.1f} turns."
    )
    _write(played, id, html_file, text_file, demonstrations_file)


@env.command()
@click.argument("id", metavar="ID|FILE")
@_options
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Episodes for each rule.")
def check(id: str, options: tuple[str, ...], seeds: int) -> int:
    """Check that an environment keeps the protocol: ID, or every environment in FILE.

    Names each rule that is broken, and how to fix it. Exits with code 1 if training would suffer.
    """
    from roll.envs.conformance import check as find

    broken = False
    for name in _environments_in(id) if id.endswith(".py") else [id]:
        findings = find(name, _settings(options), num_seeds=seeds)
        for finding in findings:
            click.echo(f"{name}: {finding}")
        fatal = sum(finding.fatal for finding in findings)
        broken = broken or fatal > 0
        click.echo(f"{name}: {'keeps the protocol' if not fatal else f'breaks {fatal} rule(s)'}.")
    return 1 if broken else 0


@env.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Where to listen; anybody who reaches it can play."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8500, show_default=True, help="0 takes a free one.")
def serve(ids: tuple[str, ...], host: str, port: int) -> None:
    """Serve environments to runs elsewhere (`host: http`): those that are shipped, and yours (ID), until Ctrl-C."""
    from roll.cluster.pool import LocalWorkerPool
    from roll.config.sandbox import SandboxConfig
    from roll.envs.places import open_hosts
    from roll.envs.registration import ENVS, find
    from roll.envs.server import environment_server
    from roll.errors import ConfigError
    from roll.running import run_to_end

    for name in ids:
        find(name)

    async def served() -> None:
        import asyncio

        pool = LocalWorkerPool(1)
        try:
            async with (
                open_hosts(pool, SandboxConfig()) as hosts,
                environment_server(hosts, {*ENVS, *ids}, host=host, port=port) as url,
            ):
                click.echo(f"{len({*ENVS, *ids})} environments at {url}; {url}/environments lists them.")
                await asyncio.Event().wait()
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {error}. Choose another --port.") from error
        finally:
            await pool.close()

    run_to_end(served())


def _environments_in(file: str) -> list[str]:
    """Return the classes of a file that look like environments: it defines them with `reset` or `step`."""
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
        raise ConfigError(f"'{file}' has no class with `reset` or `step`: name one as {file}:Class.")
    return found


def _settings(options: Sequence[str]) -> dict[str, Any]:
    """Parse arguments of the form `size=5`, with YAML values."""
    settings = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier():
            raise click.UsageError(f"'{option}' is no argument of an environment: write KEY=VALUE, for example size=5.")
        settings[key] = _value(value, option)
    return settings


def _tool(text: str) -> Any:
    """Parse a tool as in a configuration; the arguments of a user's own tool are in `options`."""
    entry = _value(text)
    if isinstance(entry, dict) and ":" in str(entry.get("tool")) and isinstance(entry.get("options"), dict):
        return {**entry["options"], "tool": entry["tool"]}
    return entry


def _value(text: str, where: str = "") -> Any:
    """Parse a YAML value."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise click.UsageError(f"'{where or text}': {str(error).splitlines()[0]}") from None


def _write(
    played: list[Transcript],
    title: str,
    html_file: str | None,
    text_file: str | None,
    demonstrations_file: str | None,
) -> None:
    from roll.envs.transcripts import as_demonstrations, as_html, as_text

    if html_file is not None:
        Path(html_file).write_text(as_html(played, title), encoding="utf-8")
        click.echo(html_file)
    if text_file is not None:
        text = "\n\n".join(map(as_text, played))
        Path(text_file).write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
        click.echo(text_file)
    if demonstrations_file is not None:
        lines = as_demonstrations(played)
        with Path(demonstrations_file).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        click.echo(f"{demonstrations_file}: {len(lines)} of {len(played)} episode(s) added")
