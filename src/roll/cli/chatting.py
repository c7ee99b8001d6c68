"""`roll chat`: a conversation with one model or several side by side, each in an embedded engine.

line typed ──► every source's own conversation ──► tokens ──► its engine ──► what is new of the answer, as it is made

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
from roll.tracking.visible import printable
from roll.types import Message

if TYPE_CHECKING:
    from roll.data import ChatRenderer
    from roll.inference.hf import HFEngine

__all__ = ["SamplingOptions", "talk"]

MOST_CONTEXT = 8192
"""Context length of an engine, if the model supports as much."""
LOOK_EVERY_S = 0.05
HELP = """\
/reset              forget the conversation
/again              answer the last message once more, with other random numbers
/system TEXT        set the system prompt, and forget the conversation
/temperature X      0 is greedy
/tokens N           the longest answer
/quit               leave (as Ctrl-D)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """Sampling options of all sources."""

    system: str = ""
    max_new_tokens: int = 512
    temperature: float = 0.7
    seed: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


@dataclass(kw_only=True, slots=True)
class _Speaker:
    """One source: a model in its engine, and its conversation so far."""

    label: str
    engine: HFEngine
    renderer: ChatRenderer
    stops: tuple[int, ...]
    max_context: int
    messages: list[Message] = field(default_factory=list)


def talk(sources: Sequence[str], manner: SamplingOptions, *, with_base: bool) -> None:
    """Read messages until the input ends, and answer each.

    Args:
        sources: runs, checkpoints, or models.
        manner: sampling options.
        with_base: whether to add the model from which the first source, a run, started.

    Raises:
        UserError: a source has no model, or the model cannot be loaded.
    """
    from roll.process_environment import prepare_environment

    prepare_environment()
    names = [*sources, _base_of(sources[0])] if with_base else list(sources)
    with asyncio.Runner() as runner:
        speakers: list[_Speaker] = []
        try:
            for name in names:
                speakers.append(runner.run(_open_speaker(name, manner)))
            _Conversation(runner, speakers, manner).run()
        finally:
            for speaker in speakers:
                runner.run(speaker.engine.close())


def _base_of(source: str) -> str:
    """Return the model from which a run, or the run of a checkpoint, started."""
    from roll.config.document import read

    place = Path(source)
    run = next((path for path in (place, place.parent.parent) if (path / "config.yaml").is_file()), None)
    if run is None:
        raise UserError(f"--base asks the model that a run began with, and '{source}' is no run: give a run first.")
    model = read(run / "config.yaml").tree.get("model")
    found = model.get("path") if isinstance(model, dict) else model
    if not isinstance(found, str):
        raise UserError(f"'{run / 'config.yaml'}' names no model.path: leave --base out, and name the model yourself.")
    return found


async def _open_speaker(name: str, manner: SamplingOptions) -> _Speaker:
    from roll.data import ChatRenderer
    from roll.inference.hf import HFEngine
    from roll.inference.spec import EngineSpec
    from roll.models import check_generates, describe_model, load_tokenizer, resolve_model, stop_token_ids

    path = resolve_model(name)
    check_generates(path, name)
    model = describe_model(path)
    most = min(model.context_length, MOST_CONTEXT)
    room = 2 * most * model.kv_bytes_per_token(element_bytes=2 if manner.dtype == "bfloat16" else 4)
    engine = HFEngine(
        EngineSpec(
            engine_id=f"chat {name}",
            kind="hf",
            model_path=str(path),
            dtype=manner.dtype,
            max_context=most,
            max_num_seqs=1,
            kv_cache_bytes=room,
        )
    )
    speaker = _Speaker(
        label=name,
        engine=engine,
        renderer=ChatRenderer(load_tokenizer(path)),
        stops=stop_token_ids(path),
        max_context=most,
    )
    await engine.start()
    return speaker


class _Conversation:
    """Reads lines, and generates an answer from every speaker."""

    def __init__(self, runner: asyncio.Runner, speakers: Sequence[_Speaker], manner: SamplingOptions) -> None:
        self._runner = runner
        self._speakers = speakers
        self._manner = manner
        self._attempts = 0
        """Number of repetitions with /again, which change the seed."""
        self._typed = sys.stdin.isatty()
        self._shown = self._typed and sys.stdout.isatty()
        """Whether the input is a terminal, so that speakers are labeled."""
        self._reset()

    def run(self) -> None:
        """Read and answer lines until the input ends."""
        if self._shown:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # gives `input` its history and editing
            click.echo(f"{', '.join(printable(s.label) for s in self._speakers)}. /help says what can be typed.")
        while (line := self._line()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._ask(line)

    def _line(self) -> str | None:
        try:
            return input("> " if self._shown else "").strip()
        except (EOFError, KeyboardInterrupt):
            if self._shown:
                click.echo("")
            return None
        except UnicodeDecodeError as error:
            raise UserError(f"the input is not UTF-8 text (byte {error.start}).") from None

    def _command(self, line: str) -> bool:
        """Run a command, a line that begins with /; return false to leave."""
        name, _, rest = line[1:].partition(" ")
        settings: dict[str, tuple[str, Callable[[str], Any]]] = {
            "temperature": ("temperature", lambda text: _number(text, float, 0)),
            "tokens": ("max_new_tokens", lambda text: _number(text, int, 1)),
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
                self._again()
            elif name in settings:
                key, read = settings[name]
                self._manner = replace(self._manner, **{key: read(rest)})
                if name == "system":
                    self._reset()
            else:
                known = ["help", "reset", "again", "quit", *settings]
                raise UserError(
                    f"there is no /{printable(name)}.{did_you_mean(name, known)} /help lists what there is."
                )
        except UserError as error:
            click.echo(f"Error: {error}", err=True)
        return True

    def _reset(self) -> None:
        self._attempts = 0
        for speaker in self._speakers:
            speaker.messages = [Message(role="system", content=self._manner.system)] if self._manner.system else []

    def _again(self) -> None:
        if not any(message.role == "user" for message in self._speakers[0].messages):
            raise UserError("nothing was said yet that could be answered again.")
        self._attempts += 1
        for speaker in self._speakers:
            if speaker.messages[-1].role == "assistant":
                speaker.messages.pop()
        self._answer()

    def _ask(self, line: str) -> None:
        self._attempts = 0
        for speaker in self._speakers:
            speaker.messages.append(Message(role="user", content=line))
        try:
            self._answer()
        except UserError as error:  # too long: the conversation is unchanged
            for speaker in self._speakers:
                while speaker.messages and speaker.messages[-1].role != "user":
                    speaker.messages.pop()
                speaker.messages.pop()
            if not self._typed:
                raise
            click.echo(f"Error: {error}", err=True)

    def _answer(self) -> None:
        for speaker in self._speakers:
            if self._shown and len(self._speakers) > 1:
                click.echo(click.style(f"── {printable(speaker.label)}", dim=True))
            said: list[str] = []
            try:
                self._runner.run(self._stream(speaker, said))
            except KeyboardInterrupt:
                if not self._typed:
                    raise
                click.echo(click.style(" (interrupted)", dim=True))
            else:
                click.echo("")
            speaker.messages.append(Message(role="assistant", content="".join(said)))

    async def _stream(self, speaker: _Speaker, said: list[str]) -> None:
        """Print an answer while it is generated; `said` receives its text in pieces."""
        from roll.inference.hf import partial_tokens
        from roll.types import GenerationRequest, SamplingParams

        tokens = speaker.renderer.render(speaker.messages)
        room = speaker.max_context - len(tokens)
        if room < 1:
            raise UserError(
                f"the conversation has {len(tokens)} tokens, and there is room for {speaker.max_context}: /reset."
            )
        turn = len(speaker.messages)
        request = GenerationRequest(
            request_id=f"{turn}.{self._attempts}",
            token_ids=tokens,
            sampling=SamplingParams(
                max_new_tokens=min(self._manner.max_new_tokens, room),
                temperature=self._manner.temperature,
                stop_token_ids=speaker.stops,
                seed=hash((self._manner.seed, turn, self._attempts)) % 2**32,
            ),
        )

        def say(text: str, *, all_of_it: bool = False) -> None:
            shown = "".join(said)
            if text.startswith(shown):
                said.append(text[len(shown) :])
                click.echo(printable(said[-1]), nl=False)
            elif all_of_it:  # a tokenizer that changes earlier words
                said[:] = [text]
                click.echo(f"\n{printable(text)}", nl=False)

        work = asyncio.create_task(speaker.engine.generate(request))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=LOOK_EVERY_S)
                if self._shown:
                    say(_whole(speaker.renderer.decode(partial_tokens(speaker.engine, request.request_id))))
            say(speaker.renderer.decode((await work).token_ids), all_of_it=True)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)  # wait until the engine has released its slot


def _whole(text: str) -> str:
    """Strip an incomplete character from the end: one character may consist of several tokens."""
    return text.rstrip("\ufffd")


def _number(text: str, kind: Callable[[str], Any], least: float) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= 1e6:
        raise UserError(f"'{printable(text)}' is not a number from {least:g} on.")
    return value
