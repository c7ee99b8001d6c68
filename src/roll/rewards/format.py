"""Check that an answer has the required format: tags in order, a pattern, JSON that matches a schema."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from roll.config.rewards import FormatReward
from roll.errors import ConfigError
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, run_in_pool
from roll.rewards.reasoning import get_scored_text
from roll.types import Rollout

__all__ = ["build_format_verifier", "check_format", "check_tags"]

MAX_TEXT_LENGTH = 200_000
_FENCE_PATTERN = re.compile(r"\s*```[a-zA-Z]*\s*\n(.*)```\s*", re.DOTALL)


def check_tags(text: str, tags: list[str], only_tags: bool, first_tag_open: bool) -> tuple[str, dict[str, str]]:
    """Return a description of the first problem with an answer's tags (an empty string if there is none), and the
    content of each tag.

    Args:
        text: The answer.
        tags: Names of the tags, in the required order; each tag must occur exactly once.
        only_tags: Whether only whitespace may stand outside the tags.
        first_tag_open: Whether the prompt opened the first tag.
    """
    if first_tag_open:
        text = f"<{tags[0]}>{text}"
    contents: dict[str, str] = {}
    position = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        for mark in (opening, closing):
            if text.count(mark) != 1:
                return f"{mark} occurs {text.count(mark)} times", {}
        begin, end = text.index(opening), text.index(closing)
        if begin < position:
            return f"<{tag}> comes too early", {}
        if end < begin:
            return f"</{tag}> comes before <{tag}>", {}
        if only_tags and text[position:begin].strip():
            return f"text before <{tag}>", {}
        contents[tag] = text[begin + len(opening) : end].strip()
        if not contents[tag]:
            return f"<{tag}> is empty", {}
        position = end + len(closing)
    if only_tags and text[position:].strip():
        return f"text after </{tags[-1]}>", {}
    return "", contents


@functools.cache
def _build_validator(schema: str) -> Any:
    from jsonschema.validators import validator_for

    parsed = json.loads(schema)
    return validator_for(parsed)(parsed)


def _reject_constant(name: str) -> float:
    """Reject `NaN` and infinities, which Python's parser accepts although they are not JSON."""
    raise ValueError(name)


def _check_json(text: str, schema: str) -> str:
    fenced = _FENCE_PATTERN.fullmatch(text)
    try:
        value = json.loads(fenced[1] if fenced else text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return "not JSON"
    error = next(_build_validator(schema).iter_errors(value), None)
    if error is None:
        return ""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    return f"JSON does not match its schema at '{place.lstrip('.') or 'the top'}' ({error.validator})"


def check_format(text: str, answer: str | None, config: FormatReward, schema: str | None) -> list[str]:
    """Return one string for each configured requirement: the problem with it, or an empty string if it is met.

    Args:
        text: The complete answer, including the model's reasoning.
        answer: The part after the model's reasoning; `None` if there is none.
        config: The requirements.
        schema: The JSON Schema, if any.
    """
    problems: list[str] = []
    contents: dict[str, str] = {}
    if config.tags:
        problem, contents = check_tags(text, config.tags, config.only_tags, config.first_tag_open)
        problems.append(problem)
    if config.pattern is not None:
        problems.append("" if re.fullmatch(config.pattern, text, re.DOTALL) else "does not match the pattern")
    if schema is not None:
        inside = contents.get(config.json_tag) if config.json_tag else answer
        problems.append("no JSON" if inside is None else _check_json(inside, schema))
    return problems


def build_format_verifier(config: FormatReward, pool: WorkerPool) -> Verifier:
    """Build the verifier of the reward `format`. It runs in the worker pool, because a pattern or a schema may take
    exponential time.

    Raises:
        ConfigError: The schema is not valid.
    """
    schema = None
    if config.json_schema is not None:
        _check_schema(config.json_schema)
        # As a string, the schema can be the key in the cache of validators.
        schema = json.dumps(config.json_schema, sort_keys=True)

    async def judge(rollout: Rollout) -> Judgement:
        text = rollout.text[:MAX_TEXT_LENGTH]
        answer = get_scored_text(rollout, config.reasoning)
        answer = None if answer is None else answer[:MAX_TEXT_LENGTH]
        problems = await run_in_pool(pool, check_format, text, answer, config, schema, time_limit_s=config.time_limit_s)
        met = sum(not problem for problem in problems) / len(problems)
        verdict = next((problem for problem in problems if problem), "fine")
        return Judgement(value=met if config.partial else float(met == 1.0), verdict=verdict)

    return Verifier(judge=judge, decides_correctness=False)


def _check_schema(schema: dict[str, Any]) -> None:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        place = ".".join(map(str, error.absolute_path)) or "the top"
        raise ConfigError(
            f"json_schema of the reward 'format' is not a valid JSON Schema, at '{place}': {error.message}."
        ) from None
