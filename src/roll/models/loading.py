"""Loads a model's tokenizer, weights and stop tokens with `transformers`, which is imported at first use."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.errors import ModelError, shorten
from roll.models.describe import check_files
from roll.models.directory import read_json
from roll.models.finite_check import check_finite
from roll.models.omni import SPEECH_PREFIXES, has_speech_parts, mark_thinker
from roll.models.quiet import silence_transformers
from roll.models.resolve import resolve_model
from roll.models.sizes import get_thinker_config, read_config
from roll.models.tied_weights import build_tied_weights_error
from roll.models.weight_reader import WeightReader, defer_weight_loading

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_load_lock = threading.Lock()
"""Serializes loading, because `transformers` patches torch modules during loading: concurrent loading in two threads
could corrupt tied or newly initialized weights."""

_MAX_TOKEN_ID = 2**31 - 1
"""The largest token ID: token arrays are int32."""
_MAX_ERROR_CHARS = 600
"""Maximum number of characters quoted from a library's error message, which may itself quote a file."""
_CACHE_LINE_BYTES = 64
"""The size of a cache line; torch aligns its memory to it."""

__all__ = [
    "build_random_lm",
    "choose_pad_token",
    "find_stop_token_ids",
    "load_causal_lm",
    "load_scorer",
    "load_tokenizer",
    "set_attention",
    "tie_weights",
]


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Raises:
        ModelError: the model cannot be found, or its tokenizer cannot be loaded.
    """
    directory = resolve_model(path, allow_quantized=True)
    read_config(directory)  # checks the sizes: `transformers` accepts any values
    from transformers import AutoTokenizer

    try:
        with silence_transformers():
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # `tokenizers` raises plain `Exception` for corrupted files
        raise ModelError(f"tokenizer of model '{path}' cannot be loaded: {_shorten_error(error)}") from error
    if tokenizer is None:
        raise ModelError(f"model '{path}' has no tokenizer: copy tokenizer.json and tokenizer_config.json there.")
    if not isinstance(longest := tokenizer.model_max_length, int | float):
        raise ModelError(
            f"tokenizer of model '{path}' cannot be used: model_max_length in tokenizer_config.json must be a number, "
            f"got {shorten(longest)}."
        )
    return tokenizer


def load_causal_lm(
    path: str | Path,
    dtype: str | torch.dtype,
    *,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    meta_init: Callable[[Any, WeightReader], object] | None = None,
) -> PreTrainedModel:
    """Load a model's weights onto the CPU, in evaluation mode.

    Args:
        path: A model in any form that `resolve_model` accepts.
        dtype: `bfloat16`, `float32`, … or a torch dtype; weights are cast to it.
        attention: The name of an attention implementation of `transformers`, including registered ones.
        trust_remote_code: Whether the model's repository may run Python code.
        meta_init: If given, the model is built on the meta device, its weights are not read, and this function is
            called with the model and the reader of its weight files.

    Raises:
        ModelError: the model cannot be found or loaded.
    """
    auto_class = _get_language_model_class(read_config(resolve_model(path)))
    model, missing = _load(auto_class, path, dtype, attention, trust_remote_code, meta_init)
    if has_speech_parts(resolve_model(path)):
        mark_thinker(model)
    if missing:  # `transformers` would use random numbers instead
        raise ModelError(
            f"model '{path}' is missing {len(missing)} of its weights, for example '{missing[0]}': copy the model "
            "again."
        )
    return model


def build_random_lm(directory: Path, dtype: torch.dtype, *, attention: str, trust_remote_code: bool) -> PreTrainedModel:
    """Build a model from its configuration, without reading weights, on torch's default device.

    Args:
        directory: A directory with a `config.json`.
        dtype: See `load_causal_lm`.
        attention: See `load_causal_lm`.
        trust_remote_code: See `load_causal_lm`.
    """
    from transformers import AutoConfig

    model = _get_language_model_class(read_config(directory)).from_config(
        AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code),
        dtype=dtype,
        attn_implementation=_choose_attention(directory, attention),
        trust_remote_code=trust_remote_code,
    )
    return model.eval()


def _get_language_model_class(config: dict[str, Any]) -> Any:
    """Return the auto class for a model: image-text-to-text if the model has a vision tower, otherwise causal LM."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reads_images = isinstance(get_thinker_config(config).get("vision_config"), Mapping)
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def load_scorer(
    path: str | Path,
    dtype: str | torch.dtype,
    *,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    meta_init: Callable[[Any, WeightReader], object] | None = None,
) -> PreTrainedModel:
    """Load a reward model, or a language model with a new, zero-initialized score head. For the arguments see
    `load_causal_lm`.

    Raises:
        ModelError: the model cannot be found or loaded, or its type has no linear head for scores.
    """
    from torch import nn
    from transformers import AutoModelForSequenceClassification

    auto_class = AutoModelForSequenceClassification
    model, missing = _load(auto_class, path, dtype, attention, trust_remote_code, meta_init, num_labels=1)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(
            f"model '{path}' cannot score text: {type(model).__name__} has no linear head `score`: use another model."
        )
    if missing == ["score.weight"]:
        nn.init.zeros_(head.weight)
    elif missing:
        raise ModelError(
            f"model '{path}' is missing {len(missing)} of its weights, for example '{missing[0]}': copy the model "
            "again."
        )
    return model


def _load(
    auto_class: Any,
    path: str | Path,
    dtype: str | torch.dtype,
    attention: str,
    trust_remote_code: bool,
    meta_init: Callable[[Any, WeightReader], object] | None,
    **settings: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model; return the model, and the names of the weights that are missing from its files."""
    directory = resolve_model(path)
    check_files(directory)
    import torch

    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(wanted, torch.dtype):
        raise ModelError(f"model '{path}': '{dtype}' is not a torch dtype; use 'bfloat16' or 'float32'.")
    try:
        leaving = defer_weight_loading() if meta_init is not None else nullcontext([])
        with _load_lock, silence_transformers(), leaving as files:
            model, report = auto_class.from_pretrained(
                directory,
                dtype=wanted,
                attn_implementation=_choose_attention(directory, attention),
                **_load_thinker_config(directory, trust_remote_code),
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # checked below: the error of `transformers` does not name the weight
                **settings,
            )
    except Exception as error:  # safetensors, JSON and model code raise various errors for corrupted files
        raise ModelError(f"model '{path}' cannot be loaded: {_shorten_error(error)}") from error
    if wrong := sorted(report["mismatched_keys"]):
        name, found, expected = wrong[0]
        if settings:
            raise ModelError(
                f"model '{path}' cannot score text: '{name}' must have shape {tuple(expected)} for a model with a "
                f"single score, got {tuple(found)}."
            )
        raise ModelError(
            f"model '{path}' has {len(wrong)} weights whose shape does not match config.json, for example '{name}': "
            f"got {tuple(found)}, expected {tuple(expected)}. Copy the model again."
        )
    if meta_init is None:
        tie_weights(model, str(path))
        check_finite(model, str(path))
        _align_weights(model)
    else:
        files[0].path = str(path)
        files[0].store_dtypes()
        # A model on the meta device has no values, so `tie_weights` compares the values in the files.
        tie_weights(model, str(path), files[0])
        meta_init(model, files[0])
    # A scorer (`settings`) that starts from a language model does not use its vocabulary projection.
    left = set(report["unexpected_keys"]) - ({"lm_head.weight"} if settings else set())
    unused = sorted(name for name in left if not name.startswith(SPEECH_PREFIXES))
    if unused:
        example = unused[0][:_MAX_ERROR_CHARS]
        logger.warning("Model %s has %d unused weights, for example %s.", path, len(unused), example)
    return model.eval(), sorted(report["missing_keys"])


def set_attention(model: Any, attention: str) -> None:
    """Set the attention implementation of a model's language model, but not of its vision tower."""
    parts = [name for name in ("text_config",) if hasattr(model.config, name)]
    model.set_attn_implementation({"": attention, **dict.fromkeys(parts, attention)} if parts else attention)


def _choose_attention(directory: Path, attention: str) -> str | dict[str, str]:
    """Return the argument of `from_pretrained` that sets the attention implementation; a vision tower uses `sdpa`.

    The patches of an image attend to each other in both directions, which packed attention does not support.
    """
    config = get_thinker_config(read_config(directory))
    towers = [name for name, part in config.items() if name.endswith("_config") and isinstance(part, Mapping)]
    towers = [name for name in towers if name not in ("text_config", "quantization_config")]
    return attention if not towers else {"": attention, "text_config": attention, **dict.fromkeys(towers, "sdpa")}


def _load_thinker_config(directory: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Return the argument `config` of `from_pretrained` for an omni model, of which only the thinker is loaded."""
    if not has_speech_parts(directory):
        return {}
    from transformers import AutoConfig

    return {"config": AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code).thinker_config}


def _align_weights(model: PreTrainedModel) -> None:
    """Move float32 weights to memory that is aligned to cache lines.

    Weights mapped from files may have any alignment, and the rounding of a vector-matrix product on a CPU depends on
    the alignment.
    """
    import torch

    for parameter in model.parameters():
        if parameter.dtype == torch.float32 and parameter.data_ptr() % _CACHE_LINE_BYTES:
            parameter.data = parameter.data.clone()


def choose_pad_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a padding token that never ends a sequence.

    `transformers` reads a sequence's score at the last token before the padding.

    Raises:
        ModelError: every special token may end a sequence.
    """
    ends = {tokenizer.eos_token_id, _find_turn_end(tokenizer)}
    likely = [tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens]
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    for token in (*likely, *added):
        if token is not None and tokenizer.convert_tokens_to_ids(token) not in ends:
            return str(token)
    raise ModelError(
        "the model's tokenizer has no pad token, and each of its special tokens may end a sequence: add a pad token."
    )


def find_stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Return the IDs of the tokens that end an answer, ascending.

    These are the tokens that the model's files name, and the token that ends a turn of the chat template. Files of base
    models often name only the token that ends a document.

    Raises:
        ModelError: an `eos_token_id` in the files is not a token ID or a list of token IDs.
    """
    directory = resolve_model(path, allow_quantized=True)
    tokenizer = tokenizer or load_tokenizer(directory)
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        named = read_json(directory / name).get("eos_token_id") if (directory / name).is_file() else None
        tokens = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(token) is int and token <= _MAX_TOKEN_ID for token in tokens):
            raise ModelError(
                f"'{directory / name}' has an invalid eos_token_id: expected a token ID or a list of token IDs, got "
                f"{shorten(named)}."
            )
        ids.update(token for token in tokens if token >= 0)  # in some files, -1 means none
    ids.update(token for token in (tokenizer.eos_token_id, _find_turn_end(tokenizer)) if token is not None)
    return tuple(sorted(int(token) for token in ids))


def _find_turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the ID of the special token that the chat template writes after an answer; `None` if there is none."""
    if not tokenizer.chat_template:
        return None
    marker = "roll-answer"
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": marker},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template is arbitrary code and may raise any error
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


def tie_weights(model: Any, path: str, files: WeightReader | None = None) -> None:
    """Tie the weights that the model's configuration ties, even if its files contain both copies.

    Args:
        model: A model of `transformers`.
        path: The path of the model, for messages.
        files: The reader of the weight files if the model is on the meta device; `None` if its weights are loaded.

    Raises:
        ModelError: two tied weights have different values.
    """
    import torch

    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        weight, shared = model.get_parameter_or_buffer(name), model.get_parameter_or_buffer(other)
        if weight is shared:
            continue
        if files is not None and name in files and other in files:
            a, b = (files.read(n, [(0, size) for size in p.shape]) for n, p in ((name, weight), (other, shared)))
        else:
            a, b = weight, shared
        if a.shape != b.shape or not torch.equal(a, b):
            raise build_tied_weights_error(path, name, other)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, shared)
