"""The hf engine's computation against plain `transformers`, over architectures; what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_helpers import engine_spec, prompt, reference_logprobs, request

from roll.errors import ModelError
from roll.inference.hf_decoder import Decoder
from roll.inference.hf_requests import BatchRow, create_row

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {},
    "phi3": {},
    "gemma2": {"attn_logit_softcapping": 0.05, "sliding_window": 64, "query_pre_attn_scalar": 8},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 7},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}


def random_model(tiny_model: Path, directory: Path, kind: str, **changes: Any) -> Path:
    """A random model of another architecture with the tiny model's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, directory / name)
    return directory


def run(decoder: Decoder, rows: list[BatchRow]) -> list[BatchRow]:
    """Decode to the end; in the order given."""
    decoder.admit(rows)
    while decoder.rows:
        decoder.step()
    return rows


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_hf_decoder_decoding_agrees_with_transformers(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    model = random_model(tiny_model, tmp_path, kind, **ARCHITECTURES[kind])
    decoder = Decoder(engine_spec(model), CPU)
    requests = [request(f"{i}", prompt(i, length)) for i, length in enumerate([1, 2, 17, 40])]
    for row in run(decoder, [create_row(one, i, 0) for i, one in enumerate(requests)]):
        expected = reference_logprobs(model, row.tokens.astype(np.int32))[row.prompt_length :]
        assert np.abs(expected - row.logprobs).max() < 1e-4
        assert np.abs(expected).mean() > 0.1  # the distributions are not degenerate
        (forced,) = decoder.logprobs([row.tokens])
        assert forced[0] == 0 and np.abs(forced[row.prompt_length :] - expected).max() < 1e-4


def test_hf_decoder_a_recurrent_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    changes = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
    model = random_model(tiny_model, tmp_path, "mamba", **changes)
    with pytest.raises(ModelError):
        Decoder(engine_spec(model), CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hf_decoder_a_rows_bits_do_not_depend_on_its_company(tiny_model: Path, dtype: str) -> None:
    """What waves do not rely on, but continuous admission does; true of the CPU kernels that we measured."""
    lengths = [12, 12, 3, 30, 7, 41, 22, 1, 9, 9, 2]
    decoder = Decoder(engine_spec(tiny_model, dtype=dtype, max_num_seqs=16), CPU)
    rows = [create_row(request(f"r{i}", prompt(i, n)), i, 0) for i, n in enumerate(lengths)]
    together = run(decoder, rows)
    for i, row in enumerate(together):
        (alone,) = run(decoder, [create_row(row.request, i, 0)])
        assert alone.tokens.tolist() == row.tokens.tolist()
        assert alone.logprobs.tobytes() == row.logprobs.tobytes()


def test_hf_decoder_a_shared_prompt_is_computed_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(engine_spec(tiny_model), CPU)
    lengths: list[int] = []
    forward = decoder._forward

    def counting(module: Any, ids: torch.Tensor, *rest: Any) -> Any:
        lengths.append(len(ids))
        return forward(module, ids, *rest)

    monkeypatch.setattr(decoder, "_forward", counting)
    shared, other = prompt(1, 20), prompt(2, 30)
    rows = [create_row(request(f"{i}", tokens), i, 0) for i, tokens in enumerate([shared, other, shared, shared])]
    decoder.admit(rows)
    assert lengths == [19, 29]
    run_on = [decoder.step() for _ in range(16)]
    assert sum(map(len, run_on)) == 4
    for row in rows:
        (alone,) = run(decoder, [create_row(row.request, 0, 0)])
        assert alone.tokens.tolist() == row.tokens.tolist()


def test_hf_decoder_rows_that_leave_take_nothing_from_those_that_stay(tiny_model: Path) -> None:
    decoder = Decoder(engine_spec(tiny_model), CPU)
    rows = [create_row(request(f"{i}", prompt(i, 5 + i), max_new_tokens=3 + 5 * (i % 3)), i, 0) for i in range(8)]
    for row in run(decoder, rows):
        expected = reference_logprobs(tiny_model, row.tokens.astype(np.int32))[row.prompt_length :]
        assert np.abs(expected - row.logprobs).max() < 1e-4


def test_hf_decoder_the_cache_stays_within_its_budget(tiny_model: Path) -> None:
    token_bytes = 2 * 2 * 2 * 8 * 4
    decoder = Decoder(engine_spec(tiny_model, kv_cache_bytes=3 * 96 * token_bytes, max_num_seqs=64), CPU)
    long = [create_row(request(f"{i}", prompt(i, 60)), i, 0) for i in range(5)]  # 76 positions, rounded up to 96
    short = [create_row(request(f"s{i}", prompt(i, 10)), i, 0) for i in range(20)]  # 26, rounded up to 32
    assert [decoder.can_join(long[i], long[:i]) for i in range(5)] == [True, True, True, False, False]
    assert sum(decoder.can_join(short[i], short[:i]) for i in range(20)) == 9
    assert not decoder.can_join(long[0], short[:3]) and decoder.can_join(long[0], short[:2])
    for rows in (long[:3], short[:9]):
        run(decoder, rows)
        held = sum(t.numel() * t.element_size() for pair in decoder._cache._layers.values() for t in pair)
        assert held <= 3 * 96 * token_bytes


def test_hf_decoder_rows_keep_their_past_while_the_cache_changes_shape(tiny_model: Path) -> None:
    decoder = Decoder(engine_spec(tiny_model, max_context=256, max_num_seqs=4), CPU)
    first = create_row(request("a", prompt(1, 10), max_new_tokens=20), 0, 0)
    second = create_row(request("b", prompt(2, 150), max_new_tokens=20), 1, 0)
    decoder.admit([first])
    decoder.step()
    decoder.admit([second])
    while decoder.rows:
        decoder.step()
    for row in (first, second):
        expected = reference_logprobs(tiny_model, row.tokens.astype(np.int32))[row.prompt_length :]
        assert np.abs(expected - row.logprobs).max() < 1e-4


def test_hf_decoder_a_cache_too_small_for_one_request_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match=r"max_context=96 .*24576 bytes.*but the cache has 20000"):
        Decoder(engine_spec(tiny_model, kv_cache_bytes=20_000), CPU)


def test_hf_decoder_a_model_whose_vocabulary_was_padded_can_be_decoded(tiny_model: Path, tmp_path: Path) -> None:
    model = random_model(tiny_model, tmp_path, "qwen2", vocab_size=300, use_sliding_window=False)
    assert json.loads((model / "config.json").read_text())["vocab_size"] == 300
    decoder = Decoder(engine_spec(model), CPU)
    (row,) = run(decoder, [create_row(request("a"), 0, 0)])
    assert row.tokens.max() < 300 and decoder.vocab_size == 300


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.integration
def test_hf_decoder_the_default_model_agrees_with_transformers(default_model: Path, dtype: str) -> None:
    decoder = Decoder(engine_spec(default_model, dtype=dtype), CPU)
    (row,) = run(decoder, [create_row(request("a", prompt(3, 30), max_new_tokens=6), 0, 0)])
    expected = reference_logprobs(default_model, row.tokens.astype(np.int32), dtype)[row.prompt_length :]
    limit = 1e-4 if dtype == "float32" else 0.1
    assert np.abs(expected - row.logprobs).mean() < limit
