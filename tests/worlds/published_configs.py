"""Sizes in the config.json of published models, and the number of parameters that their authors state."""

from __future__ import annotations

from typing import Any

__all__ = ["PUBLISHED"]


def _dense(kind: str, architecture: str, **sizes: Any) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [architecture], "torch_dtype": "bfloat16", **sizes}


PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    "Qwen/Qwen2.5-7B": (
        _dense(
            "qwen2", "Qwen2ForCausalLM", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
            num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, max_position_embeddings=131072,
            rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=False,
        ), 7_615_616_512, 7_615_616_512,
    ),
    "Qwen/Qwen3-8B": (
        _dense(
            "qwen3", "Qwen3ForCausalLM", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, head_dim=128,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=151936, max_position_embeddings=40960,
            rope_theta=1000000, tie_word_embeddings=False,
        ), 8_190_735_360, 8_190_735_360,
    ),
    "meta-llama/Llama-3.1-8B": (
        _dense(
            "llama", "LlamaForCausalLM", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
            rope_theta=500000.0, tie_word_embeddings=False,
            rope_scaling={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        ), 8_030_261_248, 8_030_261_248,
    ),
    "meta-llama/Llama-3.1-70B": (
        _dense(
            "llama", "LlamaForCausalLM", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
            num_attention_heads=64, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
            rope_theta=500000.0, tie_word_embeddings=False,
        ), 70_553_706_496, 70_553_706_496,
    ),
    "mistralai/Mistral-7B-v0.1": (
        _dense(
            "mistral", "MistralForCausalLM", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, max_position_embeddings=32768,
            sliding_window=4096, tie_word_embeddings=False,
        ), 7_241_732_096, 7_241_732_096,
    ),
    "google/gemma-2-9b": (
        _dense(
            "gemma2", "Gemma2ForCausalLM", hidden_size=3584, intermediate_size=14336, num_hidden_layers=42,
            num_attention_heads=16, num_key_value_heads=8, head_dim=256, vocab_size=256000,
            max_position_embeddings=8192, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True,
        ), 9_241_705_984, 9_241_705_984,
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        _dense(
            "mixtral", "MixtralForCausalLM", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, max_position_embeddings=32768,
            num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=False,
        ), 46_702_792_704, 12.9e9,
    ),
    "Qwen/Qwen3-30B-A3B": (
        _dense(
            "qwen3_moe", "Qwen3MoeForCausalLM", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
            num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
            num_experts=128, num_experts_per_tok=8, max_position_embeddings=40960, tie_word_embeddings=False,
            decoder_sparse_step=1, mlp_only_layers=[],
        ), 30_532_122_624, 3.3e9,
    ),
    "Qwen/Qwen3-235B-A22B": (
        _dense(
            "qwen3_moe", "Qwen3MoeForCausalLM", hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536,
            num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4, head_dim=128, vocab_size=151936,
            num_experts=128, num_experts_per_tok=8, max_position_embeddings=40960, tie_word_embeddings=False,
            decoder_sparse_step=1, mlp_only_layers=[],
        ), 235_093_634_560, 22e9,
    ),
    "deepseek-ai/DeepSeek-V3": (
        _dense(
            "deepseek_v3", "DeepseekV3ForCausalLM", hidden_size=7168, intermediate_size=18432,
            moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
            n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, n_group=8,
            topk_group=4, q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
            v_head_dim=128, vocab_size=129280, max_position_embeddings=163840, tie_word_embeddings=False,
        ), 671_026_404_352, 37e9,
    ),
    "openai/gpt-oss-120b": (
        _dense(
            "gpt_oss", "GptOssForCausalLM", hidden_size=2880, intermediate_size=2880, num_hidden_layers=36,
            num_attention_heads=64, num_key_value_heads=8, head_dim=64, vocab_size=201088, num_local_experts=128,
            num_experts_per_tok=4, max_position_embeddings=131072, sliding_window=128, tie_word_embeddings=False,
        ), 116_829_156_672, 5.1e9,
    ),
    "allenai/OLMoE-1B-7B-0924": (
        _dense(
            "olmoe", "OlmoeForCausalLM", hidden_size=2048, intermediate_size=1024, num_hidden_layers=16,
            num_attention_heads=16, num_key_value_heads=16, vocab_size=50304, num_experts=64, num_experts_per_tok=8,
            max_position_embeddings=4096, tie_word_embeddings=False,
        ), 6_919_161_856, 1.3e9,
    ),
}  # fmt: skip
"""By hub id: config.json, all parameters, and the active ones of a token (of an MoE model as its authors round it)."""
