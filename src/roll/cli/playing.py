"""Players of an environment for `roll env`: a person, random actions, the embedded engine, or a server.

Each gets the conversation: the first observation, and then in turn its answers and the resulting observations.
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
from roll.envs.transcripts import Policy, Transcript, play_episode, random_policy
from roll.errors import InfraError, UserError, raised_at
from roll.proxies import client_session
from roll.tracking.visible import printable
from roll.types import Message, described

__all__ = ["Sampling", "conversation", "one_episode", "person", "rollouts"]


_MOST_CONTEXT = 8192
"""Context length of the embedded engine, if the model supports as much."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The model that answers, and its sampling options."""

    model: str | None
    url: str | None
    max_new_tokens: int
    temperature: float


async def rollouts(
    id: str,
    options: dict[str, Any],
    policy: Literal["random", "model", "openai"],
    sampling: Sampling,
    seeds: Iterable[int],
    most_turns: int,
    tools: Sequence[Any] = (),
    form: str = "auto",
) -> list[Transcript]:
    """Play one episode for each seed, one after another.

    Args:
        id: id of the environment.
        options: arguments of the environment.
        policy: the player.
        sampling: how a model generates.
        seeds: seeds of the episodes.
        most_turns: maximum number of turns of an episode.
        tools: tools of the player, as entries of `roll.envs.tools.build_tools`.
        form: format of tool calls.

    Raises:
        UserError: the environment cannot be built, cannot sample actions, or the model cannot be used.
        InfraError: the environment or the server failed.
    """

    def choose(environment: Any, answer: Policy | None) -> Policy:
        if answer is None and not callable(getattr(environment, "sample_random_action", None)):
            raise UserError(f"environment '{id}' has no `sample_random_action()`: add it, or choose another --policy.")
        return random_policy(environment) if answer is None else answer

    async with _open_environment(policy, sampling) as answer:
        return [
            await one_episode(id, options, seed, most_turns, lambda env: choose(env, answer), tools, form)
            for seed in seeds
        ]


async def one_episode(
    id: str,
    options: dict[str, Any],
    seed: int,
    most_turns: int,
    choose: Callable[[Any], Policy],
    tools: Sequence[Any] = (),
    form: str = "auto",
) -> Transcript:
    """Play an environment once; `choose` returns the player, and the other arguments are those of `rollouts`.

    Raises:
        UserError: the environment cannot be built, or cannot be played this way.
        InfraError: the environment or the player failed.
    """
    equipped = None
    try:
        environment = make(id, options)
        if tools:
            environment = equipped = with_tools(environment, tools, form=form)
        return await play_episode(environment, choose(environment), environment=id, seed=seed, most_turns=most_turns)
    except ProtocolError as error:
        raise InfraError(f"environment '{id}', seed {seed}: {error}") from error
    except (UserError, InfraError):
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error} ({raised_at(error)})"
        raise InfraError(f"environment '{id}', seed {seed}, failed: {what}. `roll env check` says more.") from error
    finally:
        if equipped is not None:
            await equipped.close_tools()


def person(environment: Any) -> Policy:
    """Return a policy that reads actions from the terminal, and shows the result of the previous one."""

    def ask(so_far: Transcript) -> str | None:
        click.echo(printable(described(so_far.turns[-1].observation if so_far.turns else so_far.first)))
        if so_far.turns:
            click.echo(f"(reward {so_far.turns[-1].reward:g})")
        try:
            typed = click.prompt(">", default="", show_default=False, prompt_suffix=" ")
        except click.Abort:  # Ctrl-D or Ctrl-C
            return None
        if not typed and callable(getattr(environment, "sample_random_action", None)):
            typed = environment.sample_random_action()
            click.echo(f"> {typed}")
        return typed if "\\boxed" in typed or "\\boxed" not in described(so_far.first) else f"\\boxed{{{typed}}}"

    return ask


def conversation(so_far: Transcript) -> list[Message]:
    """Convert an episode to messages: observations are the user's, actions the assistant's."""
    messages: list[Message] = [Message(role="user", content=so_far.first)]
    for turn in so_far.turns:
        messages.append(Message(role="assistant", content=turn.action))
        messages.append(Message(role="user", content=turn.observation))
    return messages


@contextlib.asynccontextmanager
async def _open_environment(
    policy: Literal["random", "model", "openai"], sampling: Sampling
) -> AsyncIterator[Policy | None]:
    """Run the body with a model's policy; `None` for random actions."""
    if policy == "random":
        yield None
    elif policy == "model":
        async with _embedded(sampling) as answer:
            yield answer
    else:
        async with _served(sampling) as answer:
            yield answer


@contextlib.asynccontextmanager
async def _embedded(sampling: Sampling) -> AsyncIterator[Policy]:
    from roll.process_environment import prepare_environment

    if sampling.model is None:
        raise UserError("--policy model needs --model: a path, a run, or a name such as smollm2-135m-instruct.")
    prepare_environment()
    from roll.data import ChatRenderer
    from roll.inference.spec import EngineSpec, build_engine
    from roll.models import check_generates, describe_model, load_tokenizer, resolve_model, stop_token_ids
    from roll.types import GenerationRequest, SamplingParams

    path = resolve_model(sampling.model)
    check_generates(path, sampling.model)
    renderer = ChatRenderer(load_tokenizer(path))
    model = describe_model(path)
    most = min(model.context_length, _MOST_CONTEXT)
    engine = build_engine(
        EngineSpec(
            engine_id="play",
            kind="hf",
            model_path=str(path),
            dtype="float32",
            max_context=most,
            max_num_seqs=1,
            kv_cache_bytes=2 * most * model.kv_bytes_per_token(element_bytes=4),
        )
    )
    stops = stop_token_ids(path)
    await engine.start()

    async def answer(so_far: Transcript) -> str:
        tokens = renderer.render(conversation(so_far))
        if len(tokens) + sampling.max_new_tokens > most:
            raise UserError(
                f"after {len(so_far.turns)} turns the conversation has {len(tokens)} tokens, and there is room for "
                f"{most}: lower --turns or --max-new-tokens."
            )
        name = f"{so_far.environment}-{so_far.seed}-{len(so_far.turns)}"
        how = SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            stop_token_ids=stops,
            seed=1000 * (so_far.seed or 0) + len(so_far.turns),
        )
        generation = await engine.generate(GenerationRequest(request_id=name, token_ids=tokens, sampling=how))
        return renderer.decode(generation.token_ids)

    try:
        yield answer
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def _served(sampling: Sampling) -> AsyncIterator[Policy]:
    import aiohttp

    if sampling.url is None or sampling.model is None:
        raise UserError("--policy openai needs --url, such as http://localhost:8000/v1, and --model.")
    url = f"{sampling.url.rstrip('/')}/chat/completions"
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    async with client_session(url, headers=headers, timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def answer(so_far: Transcript) -> str:
            body = {
                "model": sampling.model,
                "messages": [message.to_dict() for message in conversation(so_far)],
                "max_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
            }
            try:
                async with session.post(url, json=body) as response:
                    if response.status != 200:
                        said = (await response.text())[:300]
                        raise UserError(f"{url} answered {response.status}: {said}")
                    found = await response.json(content_type=None)
                    return str(found["choices"][0]["message"]["content"] or "")
            except (KeyError, IndexError, TypeError, ValueError) as error:
                if isinstance(error, UserError):
                    raise
                raise InfraError(f"{url} gave no chat completion: {type(error).__name__}: {error}") from error
            except (aiohttp.ClientError, TimeoutError) as error:
                raise InfraError(f"{url} cannot be reached: {type(error).__name__}: {error}") from error

        yield answer
