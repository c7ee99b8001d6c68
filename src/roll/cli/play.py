"""Policies that play an environment for `roll env`: the user, random actions, an embedded engine, or a server.

A policy receives the conversation so far: the first observation, then its own actions and the later observations.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import click

from roll.envs.protocol import ProtocolError
from roll.envs.registration import make
from roll.envs.tools import with_tools
from roll.envs.transcripts import Policy, Transcript, make_random_policy, play_episode
from roll.errors import InfraError, UserError, find_raise_location
from roll.proxies import make_client_session
from roll.tracking.escape import escape_controls
from roll.types import Message, describe_content

__all__ = ["PlayerSettings", "build_human_policy", "build_messages", "play_episodes", "play_one_episode"]


_MAX_CONTEXT = 8192
"""Context length of the embedded engine, if the model supports as much."""


@dataclass(frozen=True, kw_only=True)
class PlayerSettings:
    """The model that chooses the actions, the server that may run the model, and sampling options."""

    model: str | None
    url: str | None
    max_new_tokens: int
    temperature: float


async def play_episodes(
    id: str,
    options: dict[str, Any],
    policy: Literal["random", "model", "openai"],
    settings: PlayerSettings,
    seeds: Iterable[int],
    max_turns: int,
    tools: Sequence[Any] = (),
    tool_format: str = "auto",
) -> list[Transcript]:
    """Play one episode for each seed, one after another, and return the transcripts.

    Args:
        id: id of the environment.
        options: arguments of the environment.
        policy: random actions, an embedded model, or a model behind an OpenAI-compatible server.
        settings: the model and its sampling options.
        seeds: seeds of the episodes.
        max_turns: maximum number of turns of an episode.
        tools: tools of the player, as entries of `roll.envs.tools.build_tools`.
        tool_format: format of tool calls.

    Raises:
        UserError: the environment cannot be built, cannot sample actions, or the model cannot be used.
        InfraError: the environment or the server failed.
    """

    def choose(environment: Any, answer: Policy | None) -> Policy:
        if answer is None and not callable(getattr(environment, "sample_random_action", None)):
            raise UserError(
                f"environment '{id}' has no `sample_random_action()`: add the method, or choose another --policy."
            )
        return make_random_policy(environment) if answer is None else answer

    async with _open_policy(policy, settings) as answer:
        return [
            await play_one_episode(id, options, seed, max_turns, lambda env: choose(env, answer), tools, tool_format)
            for seed in seeds
        ]


async def play_one_episode(
    id: str,
    options: dict[str, Any],
    seed: int,
    max_turns: int,
    build_policy: Callable[[Any], Policy],
    tools: Sequence[Any] = (),
    tool_format: str = "auto",
) -> Transcript:
    """Play one episode, and return its transcript.

    Args:
        build_policy: returns the policy for the environment.

    See `play_episodes` for the other arguments.

    Raises:
        UserError: the environment cannot be built, or does not support this policy.
        InfraError: the environment or the player failed.
    """
    equipped = None
    try:
        environment = make(id, options)
        if tools:
            environment = equipped = with_tools(environment, tools, tool_format=tool_format)
        return await play_episode(
            environment, build_policy(environment), environment=id, seed=seed, max_turns=max_turns
        )
    except ProtocolError as error:
        raise InfraError(f"environment '{id}', seed {seed}: {error}") from error
    except (UserError, InfraError):
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error} ({find_raise_location(error)})"
        raise InfraError(
            f"environment '{id}', seed {seed}, failed: {what}. Check the environment with `roll env check`."
        ) from error
    finally:
        if equipped is not None:
            await equipped.close_tools()


def build_human_policy(environment: Any) -> Policy:
    """Return a policy that reads actions from the terminal, and shows the result of the previous action."""

    def ask_player(transcript: Transcript) -> str | None:
        observation = transcript.turns[-1].observation if transcript.turns else transcript.first
        click.echo(escape_controls(describe_content(observation)))
        if transcript.turns:
            click.echo(f"(reward {transcript.turns[-1].reward:g})")
        try:
            typed = click.prompt(">", default="", show_default=False, prompt_suffix=" ")
        except click.Abort:  # Ctrl-D or Ctrl-C
            return None
        if not typed and callable(getattr(environment, "sample_random_action", None)):
            typed = environment.sample_random_action()
            click.echo(f"> {typed}")
        needs_box = "\\boxed" not in typed and "\\boxed" in describe_content(transcript.first)
        return f"\\boxed{{{typed}}}" if needs_box else typed

    return ask_player


def build_messages(transcript: Transcript) -> list[Message]:
    """Return an episode as chat messages: observations with the role user, actions with the role assistant.

    Raises:
        UserError: An observation has an image, which the policies of the command line do not support.
    """
    messages: list[Message] = [Message(role="user", content=transcript.first)]
    for turn in transcript.turns:
        messages.append(Message(role="assistant", content=turn.action))
        messages.append(Message(role="user", content=turn.observation))
    if any(message.media for message in messages):
        raise UserError(
            f"the environment '{transcript.environment}' returns images, but this command supports only text: use "
            "`--policy random`, or evaluate the model with `roll eval` and a configuration with this environment."
        )
    return messages


@contextlib.asynccontextmanager
async def _open_policy(
    policy: Literal["random", "model", "openai"], settings: PlayerSettings
) -> AsyncIterator[Policy | None]:
    """Yield the policy of the embedded model or of the server, or `None` if `policy` is `random`."""
    if policy == "random":
        yield None
    elif policy == "model":
        async with _load_local_policy(settings) as answer:
            yield answer
    else:
        async with _connect_policy_server(settings) as answer:
            yield answer


@contextlib.asynccontextmanager
async def _load_local_policy(settings: PlayerSettings) -> AsyncIterator[Policy]:
    from roll.process_environment import prepare_environment

    if settings.model is None:
        raise UserError("--policy model requires --model: a path, a run, or a name such as smollm2-135m-instruct.")
    prepare_environment()
    from roll.data import ChatRenderer
    from roll.inference.spec import EngineSpec, build_engine
    from roll.models import check_can_generate, describe_model, find_stop_token_ids, load_tokenizer, resolve_model
    from roll.types import GenerationRequest, SamplingParams

    path = resolve_model(settings.model)
    check_can_generate(path, settings.model)
    renderer = ChatRenderer(load_tokenizer(path))
    model = describe_model(path)
    most = min(model.context_length, _MAX_CONTEXT)
    engine = build_engine(
        EngineSpec(
            engine_id="play",
            kind="hf",
            model_path=str(path),
            dtype="float32",
            max_context=most,
            max_num_seqs=1,
            kv_cache_bytes=2 * most * model.compute_kv_bytes_per_token(element_bytes=4),
        )
    )
    stops = find_stop_token_ids(path)
    await engine.start()

    async def answer(transcript: Transcript) -> str:
        tokens = renderer.render(build_messages(transcript))
        if len(tokens) + settings.max_new_tokens > most:
            raise UserError(
                f"after {len(transcript.turns)} turns the conversation has {len(tokens)} tokens, and an answer of "
                f"{settings.max_new_tokens} tokens does not fit into the context length of {most}: lower --turns or "
                "--max-new-tokens."
            )
        name = f"{transcript.environment}-{transcript.seed}-{len(transcript.turns)}"
        how = SamplingParams(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            stop_token_ids=stops,
            seed=1000 * (transcript.seed or 0) + len(transcript.turns),
        )
        generation = await engine.generate(GenerationRequest(request_id=name, token_ids=tokens, sampling=how))
        return renderer.decode(generation.token_ids)

    try:
        yield answer
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def _connect_policy_server(settings: PlayerSettings) -> AsyncIterator[Policy]:
    import aiohttp

    if settings.url is None or settings.model is None:
        raise UserError("--policy openai requires --url, such as http://localhost:8000/v1, and --model.")
    url = f"{settings.url.rstrip('/')}/chat/completions"
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    async with make_client_session(url, headers=headers, timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def answer(transcript: Transcript) -> str:
            body = {
                "model": settings.model,
                "messages": [message.to_dict() for message in build_messages(transcript)],
                "max_tokens": settings.max_new_tokens,
                "temperature": settings.temperature,
            }
            try:
                async with session.post(url, json=body) as response:
                    if response.status != 200:
                        said = (await response.text())[:300]
                        raise UserError(f"{url} returned status {response.status}: {said or 'no text'}")
                    found = await response.json(content_type=None)
                    return str(found["choices"][0]["message"]["content"] or "")
            except (KeyError, IndexError, TypeError, ValueError) as error:
                if isinstance(error, UserError):
                    raise
                raise InfraError(f"{url} did not return a chat completion: {type(error).__name__}: {error}") from error
            except (aiohttp.ClientError, TimeoutError) as error:
                raise InfraError(f"{url} cannot be reached: {type(error).__name__}: {error}") from error

        yield answer
