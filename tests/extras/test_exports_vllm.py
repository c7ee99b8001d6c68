"""What ROLL exports, scored by vLLM in ROLL's own environment: the log-probs of transformers on the same files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from worlds.exported_models import FAMILIES, export_all

from roll.inference import EngineSpec, build_engine
from roll.types import GenerationRequest, SamplingParams

pytest.importorskip("vllm")
pytestmark = [pytest.mark.extras, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = np.arange(150, dtype=np.int32) * 37 % 256 + 4
BOUND = 1e-4
"""As for every other model that vLLM computes in float32: `tests/integration/test_vllm_engine.py`."""


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("gemma2", "phi3", "mixtral")])
async def test_extras_export_vllm_exports_have_the_log_probs_of_transformers_in_vllm(tmp_path: Path, name: str):
    directory = export_all(tmp_path, [name])[name]
    spec = EngineSpec(
        engine_id="engine-0", kind="vllm", model_path=str(directory), dtype="float32", max_context=192,
        max_num_seqs=4, kv_cache_bytes=8 * 2**20, num_threads=1, log_path=tmp_path / "engine.log",
    )  # fmt: skip
    engine = build_engine(spec)
    await engine.start()
    try:
        sampling = SamplingParams(max_new_tokens=12, seed=7)
        answer = await engine.generate(GenerationRequest(request_id="a", token_ids=PROMPT, sampling=sampling))
    finally:
        await engine.close()
    tokens = torch.from_numpy(np.concatenate([PROMPT, answer.token_ids]).astype(np.int64))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        scores = model(tokens[None]).logits[0].double().log_softmax(-1)[len(PROMPT) - 1 : -1]
    expected = scores.gather(1, tokens[len(PROMPT) :, None])[:, 0]
    np.testing.assert_allclose(answer.logprobs, expected, atol=BOUND)
