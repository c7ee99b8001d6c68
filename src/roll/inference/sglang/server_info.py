"""Reads `/server_info`, and checks that the server fits the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from roll.errors import EngineDiedError, ModelError
from roll.inference.sglang.launch import CONTEXT_MARGIN, to_command
from roll.inference.sglang.lora_arguments import build_lora_arguments
from roll.inference.spec import EngineSpec

__all__ = ["check_server", "fetch_info", "read_kv_capacity"]

INFO_TIMEOUT_S = 600.0


async def fetch_info(session: aiohttp.ClientSession, url: str, engine_id: str) -> dict[str, Any]:
    """Return the reply of `/server_info`.

    Raises:
        EngineDiedError: The server does not answer.
    """
    timeout = aiohttp.ClientTimeout(total=INFO_TIMEOUT_S)
    try:
        async with session.get(f"{url}/server_info", timeout=timeout) as response:
            info = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError, RuntimeError) as error:  # RuntimeError: closed
        raise EngineDiedError(engine_id, f"{url}/server_info cannot be read ({error})") from error
    return info if isinstance(info, dict) else {}


def check_server(info: Mapping[str, Any], spec: EngineSpec, url: str) -> None:
    """Check that a server has this run's model without a tokenizer, and accepts sequences of `spec.max_context` tokens.

    SGLang rejects a prompt of `max_req_input_len` tokens, a number that depends on its context and on its KV cache. It
    shortens answers that do not fit.

    Raises:
        ModelError: The server does not fit the run.
    """
    served = str(info.get("model_path", ""))
    if Path(served).name != Path(spec.model_path).name:
        raise ModelError(
            f"engine '{spec.engine_id}': the server at {url} serves '{served}', but the run's model is "
            f"'{spec.model_path}': start the server with this model."
        )
    if not info.get("skip_tokenizer_init"):
        raise ModelError(f"start the SGLang server at {url} with --skip-tokenizer-init: ROLL sends tokens.")
    if wanted := build_lora_arguments(spec):
        served = {name: info.get(name.replace("-", "_")) for name in wanted}
        fits = served["enable-lora"] and set(wanted["lora-target-modules"]) <= set(served["lora-target-modules"] or ())
        limits = ("max-lora-rank", "max-loras-per-batch", "max-loaded-loras")
        if not fits or any((served[name] or wanted[name]) < wanted[name] for name in limits):
            arguments = " ".join(to_command(wanted))
            raise ModelError(
                f"engine '{spec.engine_id}': the server at {url} cannot serve the run's adapters (model.lora): start "
                f"it with {arguments}, or set weight_sync.lora to merged."
            )
    longest = info.get("max_req_input_len")
    if isinstance(longest, int) and longest <= spec.max_context:
        raise ModelError(
            f"engine '{spec.engine_id}': the server at {url} accepts {max(longest - 1, 0)} tokens of context only, but "
            f"the run needs {spec.max_context} (inference.max_context): start it with --context-length "
            f"{spec.max_context + CONTEXT_MARGIN} and a KV cache of at least as many tokens, for example with the "
            "option max_total_tokens."
        )


def read_kv_capacity(info: Mapping[str, Any]) -> int | None:
    """Return the size of the server's KV cache in tokens, or `None` if the server does not say it."""
    size = info.get("max_total_num_tokens")
    return size if isinstance(size, int) and size > 0 else None
