"""`roll serve`: a training server for clients of the Tinker API."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from roll.errors import ConfigError, InfraError
from roll.process_environment import prepare_environment
from roll.running import run_to_end

if TYPE_CHECKING:
    from roll.serving.settings import ServeSettings

__all__ = ["serve"]


@click.command()
@click.argument("model", metavar="MODEL|FILE")
@click.option("--name", default="", metavar="NAME", help="Name by which clients select the model. Default: MODEL.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8765,
    show_default=True,
    help="Port to listen on; 0 selects a free port.",
)
@click.option("--key", "given_keys", multiple=True, metavar="[OWNER=]KEY", help="API key; may be repeated.")
@click.option("--keys", "keys_file", type=click.Path(path_type=Path), metavar="FILE", help="API keys: OWNER=KEY lines.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("runs/serve"),
    show_default=True,
    help="Directory of the checkpoints.",
)
@click.option("--engine", default="hf", show_default=True, help="Inference engine.")
@click.option("--num-engines", default=1, show_default=True, help="Number of inference engines.")
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True, help="Compute dtype."
)
@click.option("--max-rank", default=32, show_default=True, help="Maximum LoRA rank of a client's model.")
@click.option("--alpha", default=32.0, show_default=True, help="LoRA alpha of all models.")
@click.option("--max-context", type=int, help="Maximum tokens of a sequence. Default: that of MODEL, at most 4096.")
@click.option("--max-adapters", default=16, show_default=True, help="Maximum number of snapshots in an engine.")
@click.option(
    "--session-timeout",
    default=3600.0,
    show_default=True,
    help="Seconds without a heartbeat after which a session ends.",
)
@click.option(
    "--idle-timeout",
    default=900.0,
    show_default=True,
    help="Seconds without a request after which a model is moved to disk.",
)
@click.option("--num-threads", type=int, help="CPU threads of the trainer and of the engine.")
def serve(
    model: str,
    name: str,
    host: str,
    port: int,
    given_keys: tuple[str, ...],
    keys_file: Path | None,
    directory: Path,
    engine: str,
    num_engines: int,
    dtype: str,
    max_rank: int,
    alpha: float,
    max_context: int | None,
    max_adapters: int,
    session_timeout: float,
    idle_timeout: float,
    num_threads: int | None,
) -> None:
    """Serve the training of LoRA adapters on MODEL to clients of the Tinker API.

    FILE is the configuration of a run (*.yaml); its sections model, training, inference and cluster apply.

    \b
    roll serve smollm2-135m-instruct --key tml-my-secret-key
    TINKER_BASE_URL=http://127.0.0.1:8765 TINKER_API_KEY=tml-my-secret-key python client.py

    Each client has its own adapter, gradient and optimizer state; all share the weights of MODEL. Without --key and
    --keys, a new key is created and printed. docs/how-to/serve-a-training-api.md describes what is supported.
    """
    from roll.serving.settings import ServeSettings, create_key, read_keys

    chosen: dict[str, Any] = {
        "model": model,
        "engine": engine,
        "num_engines": num_engines,
        "dtype": dtype,
        "max_rank": max_rank,
        "alpha": alpha,
        "max_context": max_context,
        "num_threads": num_threads,
    }
    if model.endswith((".yaml", ".yml")):
        chosen |= _read_file(Path(model), set(chosen) - {"model"})
    keys = read_keys(given_keys, keys_file)
    created = "" if keys else create_key()
    settings = ServeSettings(
        name=name,
        directory=directory,
        host=host,
        port=port,
        keys=keys or {created: "default"},
        max_adapters=max_adapters,
        session_timeout_s=session_timeout,
        idle_timeout_s=idle_timeout,
        **chosen,
    )
    prepare_environment()
    run_to_end(_serve(settings, created))


def _read_file(file: Path, names: set[str]) -> dict[str, Any]:
    """Return the settings from a run's configuration, and check that none of the options `names` was given."""
    from roll.serving.run_settings import read_run_settings

    context = click.get_current_context()
    for name in sorted(names):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} cannot be given with '{file}': change the file, or remove {option}.")
    return read_run_settings(file)


async def _serve(settings: ServeSettings, created_key: str) -> None:
    from roll.serving.startup import open_server

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with open_server(settings, click.echo) as server:
        click.echo(f"Serving '{settings.model_name}' at {server.url}. Stop with Ctrl-C.")
        click.echo(f"export TINKER_BASE_URL={server.url}")
        if created_key:
            click.echo(f"export TINKER_API_KEY={created_key}")
        stopping, died = asyncio.create_task(stop.wait()), server.service.trainer.died
        await asyncio.wait({stopping, died}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if died.done():
            cause = str(died.exception()).removesuffix(": resume the run.")
            raise InfraError(f"{cause}: start the server again with the same options. Clients continue.")
        for number in (signal.SIGTERM, signal.SIGINT):  # a second signal ends the process at once
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # Python's handler of SIGINT would wait for the trainer's thread
        click.echo("Stopping after the running request. A second signal ends the process at once, and loses nothing.")
