"""Bind the arguments of a user's reward function by its signature, which may be ROLL's or verl's. In ROLL's form,
arguments are bound by position, otherwise by name.

def reward(text, answer, metadata)                                            by position; names may differ
def compute_score(data_source, solution_str, ground_truth, extra_info=None)   by name
def reward(solution_str, answer)                                              by name: any of these seven
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from roll.errors import ConfigError
from roll.types import Prompt

__all__ = ["bind_arguments", "build_argument_values", "check_signature"]

ROLL_PARAMETERS = ("text", "answer", "metadata")
VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
_BATCH_PARAMETERS = frozenset(
    {"prompts", "completions", "completion_ids", "data_sources", "solution_strs", "ground_truths", "extra_infos"}
)
"""Parameter names for whole batches in reward functions of other libraries."""


def build_argument_values(text: str, prompt: Prompt) -> dict[str, Any]:
    """Return the values that a reward function may receive, by name.

    Args:
        text: The model's text.
        prompt: The row; in verl's form it has `data_source`, `reward_model` with `ground_truth`, and `extra_info`.
    """
    metadata = dict(prompt.metadata)
    model = metadata.get("reward_model")
    has_reference = isinstance(model, Mapping) and model.get("ground_truth") is not None
    return {
        "text": text,
        "answer": prompt.answer,
        "metadata": metadata,
        "data_source": metadata.get("data_source") or prompt.domain,
        "solution_str": text,
        "ground_truth": model["ground_truth"] if isinstance(model, Mapping) and has_reference else prompt.answer,
        "extra_info": metadata["extra_info"] if isinstance(metadata.get("extra_info"), Mapping) else metadata,
    }


def check_signature(function: Callable[..., Any], name: object, options: Mapping[str, Any]) -> None:
    """Check that a reward function can be called.

    Args:
        function: The user's function.
        name: The function's name in messages.
        options: Additional keyword arguments from the configuration.

    Raises:
        ConfigError: The function has an unsupported signature.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a built-in without a signature: its first call shows whether it fits
    except TypeError as error:
        raise ConfigError(f"reward function '{name}' cannot be called: {error}.") from None
    problem = _find_problem(signature, options)
    if problem:
        further = "".join(f", {option}=…" for option in options)
        hint = " It is a class: specify a function, or an instance of the class." if inspect.isclass(function) else ""
        raise ConfigError(
            f"reward function '{name}' cannot be called as ({', '.join(ROLL_PARAMETERS)}{further}), nor as verl's "
            f"({', '.join(VERL_PARAMETERS)}{further}), because its signature is {signature}: {problem}.{hint}"
        )


def bind_arguments(
    function: Callable[..., Any], values: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of one call.

    Args:
        function: The user's function, whose signature was checked.
        values: The values that may be passed, by parameter name, from `build_argument_values`.
        options: Additional keyword arguments from the configuration.
    """
    ours = tuple(values[name] for name in ROLL_PARAMETERS)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return ours, dict(options)
    if _can_bind_by_position(signature, options):
        return ours, dict(options)
    named = {name: values[name] for name in _get_parameters(signature) if name in values and name not in options}
    return (), named | dict(options)


def _get_parameters(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    """Return the parameters by name, without `*args` and `**kwargs`."""
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: one for name, one in signature.parameters.items() if one.kind not in various}


def _can_bind_by_position(signature: inspect.Signature, options: Mapping[str, Any]) -> bool:
    """Return whether the function can be called with (text, answer, metadata) by position.

    The result is false if a known parameter name is at a different position.
    """
    try:
        signature.bind(*ROLL_PARAMETERS, **options)
    except TypeError:
        return False
    names = [name for name, one in _get_parameters(signature).items() if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    return all(
        name not in (*ROLL_PARAMETERS, *VERL_PARAMETERS) or name == ROLL_PARAMETERS[place]
        for place, name in enumerate(names[: len(ROLL_PARAMETERS)])
    )


def _find_problem(signature: inspect.Signature, options: Mapping[str, Any]) -> str:
    """Return the reason why the function cannot be called; an empty string if it can be called."""
    parameters = _get_parameters(signature)
    if batch := next((name for name in parameters if name in _BATCH_PARAMETERS), None):
        return f"the parameter '{batch}' receives a batch, but ROLL scores one answer at a time"
    if _can_bind_by_position(signature, options):
        return ""
    known = (*ROLL_PARAMETERS, *VERL_PARAMETERS)
    if not any(name in VERL_PARAMETERS for name in parameters) and not all(
        name in parameters for name in ROLL_PARAMETERS
    ):
        try:
            signature.bind(*ROLL_PARAMETERS, **options)
        except TypeError as error:
            return str(error)
        return f"the parameters are not in the order {', '.join(ROLL_PARAMETERS)}"
    for name, one in parameters.items():
        if name in known and one.kind is inspect.Parameter.POSITIONAL_ONLY:
            return f"'{name}' cannot be passed by name, since it is positional-only"
        if name not in known and name not in options and one.default is inspect.Parameter.empty:
            return f"ROLL has no value for the argument '{name}'"
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    unknown = next((name for name in options if name not in parameters and not takes_any), None)
    return "" if unknown is None else f"got an unexpected keyword argument '{unknown}'"
