"""Loading of a model's tokenizer, weights and stop tokens through `transformers`, which is imported at first use."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.errors import ModelError, short
from roll.models.describe import check_files
from roll.models.directory import read_json
from roll.models.finite_check import check_finite
from roll.models.quiet import silence_transformers
from roll.models.resolve import resolve_model
from roll.models.sizes import read_config
from roll.models.tied_weights import tied_weights_error
from roll.models.weight_reader import WeightReader, weights_left_in_files

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_loading = threading.Lock()
"""Serializes loading, which patches modules of torch: two concurrent loads, in a trainer's and an engine's thread,
would leave tied or fresh weights wrong."""

_MAX_TOKEN_ID = 2**31 - 1
"""The largest token id: arrays of tokens have 32 bits."""
_MAX_ERROR_CHARS = 600
"""Largest number of characters quoted from libraries' messages, which quote files with arbitrary content."""
_LINE_BYTES = 64
"""The size of a cache line, at which torch's own memory is aligned."""

__all__ = ["load_causal_lm", "load_scorer", "load_tokenizer", "pad_token", "stop_token_ids", "tie"]


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Raises:
        ModelError: the model cannot be found, or its tokenizer cannot be loaded.
    """
    directory = resolve_model(path, allow_quantized=True)
    read_config(directory)  # checks the sizes, because `transformers` accepts any
    from transformers import AutoTokenizer

    try:
        with silence_transformers():
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # `tokenizers` raises plain exceptions for damaged files
        raise ModelError(f"tokenizer of model '{path}' cannot be loaded: {_shorten_error(error)}") from error
    if tokenizer is None:
        raise ModelError(f"model '{path}' has no tokenizer: copy tokenizer.json and tokenizer_config.json there.")
    if not isinstance(longest := tokenizer.model_max_length, int | float):
        raise ModelError(
            f"tokenizer of model '{path}' cannot be used: tokenizer_config.json has model_max_length: "
            f"{short(longest)}, but it must be a number."
        )
    return tokenizer


def load_causal_lm(
    path: str | Path,
    dtype: str | torch.dtype,
    *,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    left: Callable[[Any, WeightReader], object] | None = None,
) -> PreTrainedModel:
    """Load a model's weights onto the CPU, in evaluation mode.

    Args:
        path: A model in any form that `resolve_model` accepts.
        dtype: `bfloat16`, `float32`, … or a torch dtype; weights are cast to it.
        attention: The name of an attention implementation of `transformers`, including registered ones.
        trust_remote_code: Whether the model's repository may run its own Python code.
        left: A function that is called with the model and its files. If given, weights stay in their files, and the
            model on the meta device.

    Raises:
        ModelError: the model cannot be found or loaded.
    """
    from transformers import AutoModelForCausalLM

    model, missing = _load(AutoModelForCausalLM, path, dtype, attention, trust_remote_code, left)
    if missing:  # `transformers` would use random numbers instead
        raise ModelError(f"model '{path}' lacks {len(missing)} of its weights, first '{missing[0]}': copy it again.")
    return model


def load_scorer(
    path: str | Path,
    dtype: str | torch.dtype,
    *,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    left: Callable[[Any, WeightReader], object] | None = None,
) -> PreTrainedModel:
    """Load a reward model, or a language model with a new head whose scores are all 0; otherwise like `load_causal_lm`.

    Raises:
        ModelError: the model cannot be found or loaded, or models of its kind do not read a score from a text's last
            state.
    """
    from torch import nn
    from transformers import AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification
    model, missing = _load(kind, path, dtype, attention, trust_remote_code, left, num_labels=1)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(f"model '{path}' cannot score texts: {type(model).__name__} has no linear head `score`.")
    if missing == ["score.weight"]:
        nn.init.zeros_(head.weight)
    elif missing:
        raise ModelError(f"model '{path}' lacks {len(missing)} of its weights, first '{missing[0]}': copy it again.")
    return model


def _load(
    kind: Any,
    path: str | Path,
    dtype: str | torch.dtype,
    attention: str,
    trust_remote_code: bool,
    left: Callable[[Any, WeightReader], object] | None,
    **settings: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model, and return it with the names of weights that its files lack."""
    directory = resolve_model(path)
    check_files(directory)
    import torch

    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(wanted, torch.dtype):
        raise ModelError(f"model '{path}': dtype '{dtype}' is not a number format; write 'bfloat16' or 'float32'.")
    try:
        leaving = weights_left_in_files() if left is not None else nullcontext([])
        with _loading, silence_transformers(), leaving as files:
            model, report = kind.from_pretrained(
                directory,
                dtype=wanted,
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # its own error does not name the weight
                **settings,
            )
    except Exception as error:  # safetensors, JSON and model code of arbitrary files each fail in their own way
        raise ModelError(f"model '{path}' cannot be loaded: {_shorten_error(error)}") from error
    if wrong := sorted(report["mismatched_keys"]):
        name, found, expected = wrong[0]
        if settings:
            raise ModelError(
                f"model '{path}' cannot score texts: the shape of '{name}' is {tuple(found)}; a model with one score "
                f"needs {tuple(expected)}."
            )
        raise ModelError(
            f"model '{path}' has {len(wrong)} weights whose shape does not match config.json, first '{name}': "
            f"got {tuple(found)}, expected {tuple(expected)}. Copy the model again."
        )
    if left is None:
        tie(model, str(path))
        check_finite(model, str(path))
        _align(model)
    else:
        files[0].path = str(path)
        files[0].note_dtypes()
        tie(model, str(path), files[0])
        left(model, files[0])
    unused = sorted(set(report["unexpected_keys"]) - ({"lm_head.weight"} if settings else set()))
    if unused:
        logger.warning(
            "Model %s has %d weights that are not used, first %s.", path, len(unused), unused[0][:_MAX_ERROR_CHARS]
        )
    return model.eval(), sorted(report["missing_keys"])


def _align(model: PreTrainedModel) -> None:
    """Move float32 weights to memory that is aligned to cache lines.

    Files put them at any address, and a CPU rounds the product of a single row with a matrix depending on the
    alignment.
    """
    import torch

    for parameter in model.parameters():
        if parameter.dtype == torch.float32 and parameter.data_ptr() % _LINE_BYTES:
            parameter.data = parameter.data.clone()


def pad_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a padding token that never ends a text: `transformers` reads a text's score at the last token before
    padding.

    Raises:
        ModelError: every special token may end a text.
    """
    ends = {tokenizer.eos_token_id, _turn_end(tokenizer)}
    likely = [tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens]
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    for token in (*likely, *added):
        if token is not None and tokenizer.convert_tokens_to_ids(token) not in ends:
            return str(token)
    raise ModelError(
        "the model's tokenizer needs a padding token: all of its special tokens end a text. Add another one."
    )


def stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Return the tokens that end an answer, ascending: those that the model's files name, and the one that ends a chat
    turn.

    The last matters for base models, whose files often name only the end of a document.

    Raises:
        ModelError: the files name values that are not tokens.
    """
    directory = resolve_model(path, allow_quantized=True)
    tokenizer = tokenizer or load_tokenizer(directory)
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        named = read_json(directory / name).get("eos_token_id") if (directory / name).is_file() else None
        tokens = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(token) is int and token <= _MAX_TOKEN_ID for token in tokens):
            raise ModelError(
                f"'{directory / name}' has eos_token_id: {short(named)}, but it must be a token ID or a list of "
                "token IDs."
            )
        ids.update(token for token in tokens if token >= 0)  # some files use -1 for none
    ids.update(token for token in (tokenizer.eos_token_id, _turn_end(tokenizer)) if token is not None)
    return tuple(sorted(int(token) for token in ids))


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token that the chat template writes after an assistant message, if any."""
    if not tokenizer.chat_template:
        return None
    marker = "roll-answer"
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": marker},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template is arbitrary code: it may reject these messages in any way
        return None
    after = str(text).rpartition(marker)[2].strip()
    ids = tokenizer(after, add_special_tokens=False)["input_ids"][:1] if after else []
    special = set(tokenizer.all_special_ids) | {
        id for id, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    return ids[0] if ids and ids[0] in special else None


def _shorten_error(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:_MAX_ERROR_CHARS] or type(error).__name__


def tie(model: Any, path: str, files: WeightReader | None = None) -> None:
    """Tie the weights that a loaded model's configuration ties, even where its files contain both.

    Args:
        model: A model of `transformers`.
        path: The path of the model, for messages.
        files: The files that still hold the weights; by default the model holds them.

    Raises:
        ModelError: two tied weights have different values.
    """
    import torch

    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        own, shared = model.get_parameter_or_buffer(name), model.get_parameter_or_buffer(other)
        if own is shared:
            continue
        if files is not None and name in files and other in files:
            a, b = (files.read(n, [(0, size) for size in p.shape]) for n, p in ((name, own), (other, shared)))
        else:
            a, b = own, shared
        if a.shape != b.shape or not torch.equal(a, b):
            raise tied_weights_error(path, name, other)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, shared)
