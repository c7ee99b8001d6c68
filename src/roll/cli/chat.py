"""`roll chat`: a conversation with one model or several side by side, each in an embedded engine.

typed line ──► conversation of each source ──► tokens ──► engine of the source ──► new text of the answer, streamed

Invariants: a model's text is made printable before it reaches the terminal; an interrupted answer stays in the
conversation up to the interruption.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from roll.errors import UserError
from roll.registry import did_you_mean
from roll.tracking.escape import escape_controls
from roll.types import Message

if TYPE_CHECKING:
    from roll.data import ChatRenderer
    from roll.inference.hf import HFEngine

__all__ = ["SamplingOptions", "chat_with_models"]

MAX_CONTEXT = 8192
"""Context length of an engine, if the model supports as much."""
POLL_INTERVAL_S = 0.05
_MAX_NUMBER = 1e6
"""Largest number that a command of the chat accepts."""
HELP = """\
/reset              reset the conversation
/again              answer the last message again, with another seed
/system TEXT        set the system prompt, and reset the conversation
/temperature X      set the sampling temperature; 0 is greedy
/tokens N           set the maximum number of tokens of an answer
/quit               quit (as Ctrl-D)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """Sampling options that all models of a chat share."""

    system: str = ""
    max_new_tokens: int = 512
    temperature: float = 0.7
    seed: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


@dataclass(kw_only=True, slots=True)
class _ChatModel:
    """A model with its engine and its conversation so far."""

    label: str
    engine: HFEngine
    renderer: ChatRenderer
    stop_token_ids: tuple[int, ...]
    max_context: int
    messages: list[Message] = field(default_factory=list)


def chat_with_models(sources: Sequence[str], options: SamplingOptions, *, with_base: bool) -> None:
    """Read messages until the input ends, and answer each message with every model.

    Args:
        sources: runs, checkpoints, or models.
        options: sampling options.
        with_base: whether to add the initial model of the first source, which must be a run.

    Raises:
        UserError: a source has no model, or the model cannot be loaded.
    """
    from roll.process_environment import prepare_environment

    prepare_environment()
    names = [*sources, _find_base_model(sources[0])] if with_base else list(sources)
    with asyncio.Runner() as runner:
        models: list[_ChatModel] = []
        try:
            for name in names:
                models.append(runner.run(_open_model(name, options)))
            _Conversation(runner, models, options).run()
        finally:
            for model in models:
                runner.run(model.engine.close())


def _find_base_model(source: str) -> str:
    """Return the initial model of a run; `source` is the run's directory or one of its checkpoints."""
    from roll.config.document import read

    place = Path(source)
    run = next((path for path in (place, place.parent.parent) if (path / "config.yaml").is_file()), None)
    if run is None:
        raise UserError(f"--base requires a run as the first argument, but '{source}' is not a run.")
    model = read(run / "config.yaml").tree.get("model")
    found = model.get("path") if isinstance(model, dict) else model
    if not isinstance(found, str):
        raise UserError(f"'{run / 'config.yaml'}' has no model.path: remove --base and pass the model as an argument.")
    return found


async def _open_model(name: str, options: SamplingOptions) -> _ChatModel:
    from roll.data import ChatRenderer
    from roll.inference.hf import HFEngine
    from roll.inference.spec import EngineSpec
    from roll.models import check_can_generate, describe_model, find_stop_token_ids, load_tokenizer, resolve_model

    path = resolve_model(name)
    check_can_generate(path, name)
    sizes = describe_model(path)
    most = min(sizes.context_length, MAX_CONTEXT)
    room = 2 * most * sizes.compute_kv_bytes_per_token(element_bytes=2 if options.dtype == "bfloat16" else 4)
    engine = HFEngine(
        EngineSpec(
            engine_id=f"chat {name}",
            kind="hf",
            model_path=str(path),
            dtype=options.dtype,
            max_context=most,
            max_num_seqs=1,
            kv_cache_bytes=room,
        )
    )
    model = _ChatModel(
        label=name,
        engine=engine,
        renderer=ChatRenderer(load_tokenizer(path)),
        stop_token_ids=find_stop_token_ids(path),
        max_context=most,
    )
    await engine.start()
    return model


class _Conversation:
    """Reads messages and commands, and answers each message with every model."""

    def __init__(self, runner: asyncio.Runner, models: Sequence[_ChatModel], options: SamplingOptions) -> None:
        self._runner = runner
        self._models = models
        self._options = options
        self._attempts = 0
        """Number of repetitions with /again; each changes the seed."""
        self._is_typed = sys.stdin.isatty()
        self._is_interactive = self._is_typed and sys.stdout.isatty()
        """True if the input is a terminal, so that answers are labeled with their models."""
        self._reset()

    def run(self) -> None:
        """Read and answer lines until the input ends."""
        if self._is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # gives `input` its history and editing
            click.echo(f"{', '.join(escape_controls(s.label) for s in self._models)}. /help lists the commands.")
        while (line := self._read_line()) is not None:
            if line.startswith("/"):
                if not self._run_command(line):
                    return
            elif line:
                self._ask(line)

    def _read_line(self) -> str | None:
        try:
            return input("> " if self._is_interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            if self._is_interactive:
                click.echo("")
            return None
        except UnicodeDecodeError as error:
            raise UserError(f"the input is not UTF-8 text (byte {error.start}).") from None

    def _run_command(self, line: str) -> bool:
        """Run a command such as `/reset`, or print its error; return false if the command ends the chat."""
        name, _, rest = line[1:].partition(" ")
        settings: dict[str, tuple[str, Callable[[str], Any]]] = {
            "temperature": ("temperature", lambda text: _parse_number(text, float, 0)),
            "tokens": ("max_new_tokens", lambda text: _parse_number(text, int, 1)),
            "system": ("system", str),
        }
        try:
            if name == "quit":
                return False
            if name == "help":
                click.echo(HELP)
            elif name == "reset":
                self._reset()
            elif name == "again":
                self._regenerate()
            elif name in settings:
                key, read = settings[name]
                self._options = replace(self._options, **{key: read(rest)})
                if name == "system":
                    self._reset()
            else:
                known = ["help", "reset", "again", "quit", *settings]
                raise UserError(f"unknown command /{escape_controls(name)}.{did_you_mean(name, known)} Type /help.")
        except UserError as error:
            click.echo(f"Error: {error}", err=True)
        return True

    def _reset(self) -> None:
        self._attempts = 0
        for model in self._models:
            model.messages = [Message(role="system", content=self._options.system)] if self._options.system else []

    def _regenerate(self) -> None:
        if not any(message.role == "user" for message in self._models[0].messages):
            raise UserError("the conversation is empty: type a message first.")
        self._attempts += 1
        for model in self._models:
            if model.messages[-1].role == "assistant":
                model.messages.pop()
        self._answer()

    def _ask(self, line: str) -> None:
        self._attempts = 0
        for model in self._models:
            model.messages.append(Message(role="user", content=line))
        try:
            self._answer()
        except UserError as error:  # the conversation is too long: leave it unchanged
            for model in self._models:
                while model.messages and model.messages[-1].role != "user":
                    model.messages.pop()
                model.messages.pop()
            if not self._is_typed:
                raise
            click.echo(f"Error: {error}", err=True)

    def _answer(self) -> None:
        for model in self._models:
            if self._is_interactive and len(self._models) > 1:
                click.echo(click.style(f"── {escape_controls(model.label)}", dim=True))
            pieces: list[str] = []
            try:
                self._runner.run(self._stream(model, pieces))
            except KeyboardInterrupt:
                if not self._is_typed:
                    raise
                click.echo(click.style(" (interrupted)", dim=True))
            else:
                click.echo("")
            model.messages.append(Message(role="assistant", content="".join(pieces)))

    async def _stream(self, model: _ChatModel, pieces: list[str]) -> None:
        """Generate a model's answer, print the text while it is generated, and append the text pieces to `pieces`."""
        from roll.inference.hf import get_partial_tokens
        from roll.types import GenerationRequest, SamplingParams

        tokens = model.renderer.render(model.messages)
        room = model.max_context - len(tokens)
        if room < 1:
            raise UserError(
                f"the conversation has {len(tokens)} tokens, but the model's context length is {model.max_context}: "
                "type /reset."
            )
        turn = len(model.messages)
        request = GenerationRequest(
            request_id=f"{turn}.{self._attempts}",
            token_ids=tokens,
            sampling=SamplingParams(
                max_new_tokens=min(self._options.max_new_tokens, room),
                temperature=self._options.temperature,
                stop_token_ids=model.stop_token_ids,
                seed=hash((self._options.seed, turn, self._attempts)) % 2**32,
            ),
        )

        def print_new_text(text: str, *, is_complete: bool = False) -> None:
            printed = "".join(pieces)
            if text.startswith(printed):
                pieces.append(text[len(printed) :])
                click.echo(escape_controls(pieces[-1]), nl=False)
            elif is_complete:  # the tokenizer has changed earlier words
                pieces[:] = [text]
                click.echo(f"\n{escape_controls(text)}", nl=False)

        work = asyncio.create_task(model.engine.generate(request))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=POLL_INTERVAL_S)
                if self._is_interactive:
                    print_new_text(
                        _strip_partial_character(
                            model.renderer.decode(get_partial_tokens(model.engine, request.request_id))
                        )
                    )
            print_new_text(model.renderer.decode((await work).token_ids), is_complete=True)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)  # wait until the engine has released its slot


def _strip_partial_character(text: str) -> str:
    """Strip an incomplete character from the end: one character may consist of several tokens."""
    return text.rstrip("\ufffd")


def _parse_number(text: str, parse: Callable[[str], Any], minimum: float) -> Any:
    try:
        value = parse(text)
    except ValueError:
        value = None
    if value is None or not minimum <= value <= _MAX_NUMBER:
        raise UserError(f"expected a number from {minimum:g} to {_MAX_NUMBER:,.0f}, got '{escape_controls(text)}'.")
    return value
