"""Estimates against sums worked out by hand, and activations against what autograd really keeps."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from worlds.model_sizes import Sizes

from roll.config.activation_memory import (
    PeakStageFractions,
    compute_peak_stage_fractions,
    estimate_activation_bytes_per_token,
    estimate_forward_backward_bytes,
    estimate_gathered_bytes,
    estimate_logit_bytes,
)
from roll.config.adapter_parameters import count_lora_parameters
from roll.config.estimate import (
    DEFAULT_CPU_KV_BYTES,
    JudgeEngines,
    estimate_disk_use,
    estimate_frozen_bytes,
    estimate_heap_bytes,
    estimate_kernel_bytes,
    estimate_sync_bytes,
    estimate_training_bytes,
)
from roll.config.load import load_config
from roll.config.model import LoRAConfig
from roll.config.parallel import ParallelConfig
from roll.config.training import should_trim_heap
from roll.models import describe_model
from roll.pipelines.online.check.estimate import (
    compute_run_sizes,
    estimate_memory_by_role,
    estimate_rollout_bytes,
)
from roll.pipelines.reinforcement.check import estimate_extra_memory

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
RAY = ["cluster.type=ray", "cluster.device_mapping.actor_train=0-1", "cluster.device_mapping.actor_infer=0-1"]


def batch_of(*overrides, longest=40, train=57, held_out=24):
    config = load_config(QUICKSTART, overrides)
    return config, compute_run_sizes(
        config, longest_prompt=longest, train_prompts={"arithmetic": train}, held_out_prompts=held_out
    )


def memory_of(*overrides, kind="hf", on_accelerator=False):
    config, batch = batch_of(*overrides)
    further = estimate_extra_memory(config, Sizes(), batch)
    roles = estimate_memory_by_role(
        config, Sizes(), batch, engine_kind=kind, max_context=72, on_accelerator=on_accelerator, extra=further
    )
    return {role.role: role for role in roles}


def test_config_estimate_the_quickstart_divides_as_worked_out_by_hand():
    _, batch = batch_of()
    assert batch.rollouts_per_step == 8 * 8
    assert batch.generated_tokens == 64 * 32
    assert batch.trained_tokens == 8 * (40 + 8 * 32)
    assert (batch.micro_batches, batch.tokens_per_micro_batch) == (1, 2368)
    assert batch.evaluation_samples == 24 * 4
    assert batch.num_evaluations == 5  # before, after 8, 16, 24, and after the last, 32
    assert batch.epochs == {"arithmetic": pytest.approx(32 * 8 / 57)}


def test_config_estimate_without_sharing_every_rollout_brings_its_prompt():
    _, batch = batch_of("training.share_prefix=false", "training.max_tokens_per_micro_batch=1000")
    assert batch.trained_tokens == 64 * (40 + 32)
    assert batch.micro_batches == 5  # 4608 / 1000
    assert batch.tokens_per_micro_batch == 1000


def test_config_estimate_ranks_divide_the_tokens_between_them():
    _, batch = batch_of(*RAY)
    assert batch.tokens_per_micro_batch == 2368 // 2


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.num_steps=40", "evaluation.every_num_steps=10"], 5),
        (["training.num_steps=45", "evaluation.every_num_steps=10"], 6),
        (["training.num_steps=5", "evaluation.every_num_steps=10"], 2),
        (["evaluation.every_num_steps=0"], 2),
        (["evaluation.every_num_steps=0", "evaluation.before_training=false"], 1),
    ],
)
def test_config_estimate_evaluations_are_counted(overrides, expected):
    assert batch_of(*overrides)[1].num_evaluations == expected


def test_config_estimate_without_held_out_prompts_nothing_is_evaluated():
    _, batch = batch_of(held_out=0)
    assert (batch.num_evaluations, batch.evaluation_samples) == (0, 0)


def test_config_estimate_epochs_follow_the_weights_of_the_sources():
    config = load_config(QUICKSTART, ["data.0.weight=3", "data.1={source: file, path: x.jsonl, reward: exact}"])
    batch = compute_run_sizes(
        config, longest_prompt=10, train_prompts={"arithmetic": 60, "file": 40}, held_out_prompts=0
    )
    assert batch.epochs == {"arithmetic": pytest.approx(192 / 60), "file": pytest.approx(64 / 40)}


def test_config_estimate_a_bfloat16_trainer_holds_masters_gradients_moments_and_a_copy():
    parts = memory_of()["actor_train"].parts
    assert parts["master weights"] == 4_000_000
    assert parts["gradients"] == 4_000_000
    assert parts["AdamW"] == 8_000_000
    assert parts["weights"] == 2_000_000


def test_config_estimate_a_float32_trainer_needs_no_masters_apart():
    parts = memory_of("model.dtype=float32")["actor_train"].parts
    assert "master weights" not in parts
    assert (parts["weights"], parts["gradients"], parts["AdamW"]) == (4_000_000, 4_000_000, 8_000_000)


def test_config_estimate_moments_in_8_bits_take_a_quarter_and_their_scales():
    parts = memory_of("training.optimizer=adamw_8bit")["actor_train"].parts
    assert parts["AdamW"] == 2_000_000 + 8 * 1_000_000 // 256


def test_config_estimate_adapters_alone_have_gradients_and_moments():
    adapters = count_lora_parameters(Sizes(), LoRAConfig(rank=4))
    # per layer: q and o 192+192 each, k and v 192+64 each, gate, up and down 192+512 each; times rank and layers
    assert adapters == 2 * 4 * (2 * 384 + 2 * 256 + 3 * 704)
    parts = memory_of("model.lora.rank=4")["actor_train"].parts
    assert (parts["weights"], parts["gradients"], parts["AdamW"]) == (2_000_000, 4 * adapters, 8 * adapters)


def test_config_estimate_a_base_in_4_bits_leaves_embeddings_and_norms():
    linear = 2 * 192 * (2 * 192 + 2 * 64 + 3 * 512)
    parts = memory_of("model.lora.rank=4", "model.lora.base=nf4")["actor_train"].parts
    assert parts["weights"] == 2 * (1_000_000 - linear)
    assert parts["weights in 4 bits"] == round(linear * (0.5 + 1 / 64 + 4 / 256 / 64))


def test_config_estimate_ranks_share_the_trainers_states():
    one, two = memory_of()["actor_train"], memory_of(*RAY)["actor_train"]
    assert two.count == 2
    assert two.parts["AdamW"] == one.parts["AdamW"] // 2
    assert two.bytes_total == 2 * two.bytes_each


def test_config_estimate_an_engine_holds_weights_and_keys_and_values():
    per_token = 2 * 2 * 64 * 2  # keys and values, layers, one head of 64, bfloat16
    assert memory_of()["actor_infer"].parts["KV cache"] == 64 * 72 * per_token
    assert memory_of("inference.max_num_seqs=4")["actor_infer"].parts["KV cache"] == 4 * 72 * per_token
    assert memory_of("inference.kv_cache_bytes=1000")["actor_infer"].parts["KV cache"] == 1000
    assert memory_of(kind="vllm")["actor_infer"].parts["KV cache"] == DEFAULT_CPU_KV_BYTES


def test_config_estimate_a_judge_holds_a_model_of_its_own_and_its_requests():
    overrides = ["data.0.reward=judge", "judge.dtype=float32", "judge.num_engines=2", "judge.max_num_seqs=4"]
    config, batch = batch_of(*overrides)
    judge = JudgeEngines(sizes=Sizes(num_parameters=3_000_000), kind="hf", max_context=500)
    roles = estimate_memory_by_role(
        config, Sizes(), batch, engine_kind="hf", max_context=72, on_accelerator=True, judge=judge
    )
    (found,) = [role for role in roles if role.role == "judge"]
    assert found.count == 2
    # keys and values, layers, one head of 64, float32
    assert dict(found.parts) == {"weights": 12_000_000, "KV cache": 4 * 500 * 2 * 2 * 64 * 4}
    assert found.bytes_total == 2 * (12_000_000 + 2_048_000)


def test_config_estimate_a_reference_is_there_only_for_a_penalty():
    assert "reference" not in memory_of()
    parts = memory_of("algorithm.kl.coefficient=0.1")["reference"].parts
    assert parts == {"weights": 2_000_000, "logits": 2368 * 256 * (8 + 2)}


def test_config_estimate_a_reference_on_two_ranks_gathers_a_layer_in_a_buffer():
    reference = memory_of("algorithm.kl.coefficient=0.1", *RAY)["reference"]
    embedding = 256 * 192
    assert reference.count == 2
    assert reference.parts["weights"] == 1_000_000
    assert reference.parts["gathered weights"] == 2 * 2 * ((1_000_000 - embedding) // 2)


def test_config_estimate_with_adapters_the_policy_is_its_own_reference():
    assert "reference" not in memory_of("algorithm.kl.coefficient=0.1", "model.lora.rank=4")


def test_config_estimate_for_the_full_divergence_the_trainer_keeps_the_reference():
    full = ["algorithm.kl.coefficient=0.1", "algorithm.kl.estimator=full"]
    roles = memory_of(*full)
    assert "reference" not in roles
    assert roles["actor_train"].parts["reference"] == 2_000_000
    assert "reference" not in memory_of(*full, "model.lora.rank=4")["actor_train"].parts


def test_config_estimate_every_critic_is_trained_in_full_but_has_no_logits():
    assert "critic" not in memory_of()
    critic = memory_of("algorithm.type=ppo")["critic"]
    policy = memory_of()["actor_train"]
    assert critic.count == 1
    assert critic.parts == {
        name: size for name, size in policy.parts.items() if name not in ("logits", "heap", "matmul kernels")
    }
    assert memory_of("algorithm.type=asy_ppo")["critic"].bytes_total == 2 * critic.bytes_total


def test_config_estimate_critics_of_another_model_count_with_its_size():
    config, batch = batch_of("algorithm.type=ppo")
    roles = estimate_memory_by_role(
        config,
        Sizes(),
        batch,
        engine_kind="hf",
        max_context=72,
        on_accelerator=False,
        extra=estimate_extra_memory(config, Sizes(), batch, critic_sizes=Sizes(num_parameters=500_000)),
    )
    critic = next(role for role in roles if role.role == "critic")
    assert (critic.parts["AdamW"], critic.parts["weights"]) == (4_000_000, 1_000_000)


def test_config_estimate_critics_on_devices_of_their_own_are_spread_over_them():
    critic = memory_of("algorithm.type=asy_ppo", *RAY, "cluster.device_mapping.critic=2-5")["critic"]
    assert critic.count == 2 * 4
    assert critic.parts["AdamW"] == 8_000_000 // 4


def test_config_estimate_codes_that_are_sent_count_beyond_the_activations_that_are_gone_by_then():
    # 2 layers x 192 x (3 + 3 + 1 + 1 heads of 64, and 3 x 512), and as many experts
    linear, experts = 2 * 192 * (8 * 64 + 3 * 512), 10**10
    config, batch = batch_of("weight_sync.quantization=fp8")
    sizes = Sizes(expert_parameters=experts, num_parameters=2 * 10**10)
    assert estimate_sync_bytes("fp8", Sizes(), 2) == 2 * (1_000_000 - linear) + linear
    assert estimate_sync_bytes("none", Sizes(), 2) == 2_000_000
    roles = estimate_memory_by_role(config, sizes, batch, engine_kind="hf", max_context=72, on_accelerator=False)
    policy = roles[0].parts
    assert policy["weights in codes"] == linear + experts - policy["activations"]
    assert "weights in codes" not in memory_of("weight_sync.quantization=fp8")["actor_train"].parts


@pytest.mark.parametrize(
    ("form", "on_accelerator", "code_bytes"), [("int8", False, 1), ("fp8", False, 3), ("fp8", True, 1)]
)
def test_config_estimate_engines_that_compute_in_8_bits_hold_codes(
    form: str, on_accelerator: bool, code_bytes: int
) -> None:
    """On a CPU, fp8 codes are held in 8 and in 16 bits."""
    linear = 2 * 192 * (8 * 64 + 3 * 512)
    config, batch = batch_of(f"inference.quantization={form}")
    roles = estimate_memory_by_role(
        config, Sizes(), batch, engine_kind="vllm", max_context=72, on_accelerator=on_accelerator
    )
    (engine,) = (role for role in roles if role.role == "actor_infer")
    assert engine.parts["weights"] == 2 * (1_000_000 - linear) + code_bytes * linear


def test_config_estimate_libraries_count_in_main_memory_only():
    assert memory_of()["processes"].count == 1
    assert memory_of(*RAY)["processes"].count == 1 + 2 + 2
    assert memory_of(*RAY, "algorithm.type=asy_ppo")["processes"].count == 1 + 2 + 2 + 2 * 2
    assert "processes" not in memory_of(on_accelerator=True)


def test_config_estimate_processes_that_score_answers_count_in_main_memory() -> None:
    workers = memory_of("rollout.num_reward_workers=3")["rewards"]
    assert (workers.count, workers.bytes_each) == (3, 96 * 2**20)
    assert "rewards" not in memory_of(on_accelerator=True)


def test_config_estimate_engines_hold_the_requests_of_an_evaluation_where_it_has_more() -> None:
    """The quickstart: 8 x 8 rollouts in a step, and 4 answers to each of 24 prompts in an evaluation."""
    many = "inference.max_num_seqs=200"
    per_step = memory_of(many, "evaluation.num_prompts=1")["actor_infer"].parts["KV cache"]
    evaluated = memory_of(many)["actor_infer"].parts["KV cache"]
    assert evaluated == min(per_step * 96 // 64, 256 * 2**20)


def test_config_estimate_the_run_s_own_process_writes_rollouts() -> None:
    assert memory_of(*RAY)["rollouts"].count == 1
    assert "rollouts" not in memory_of("tracking.rollouts=false")
    assert "rollouts" not in memory_of(on_accelerator=True)


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([], 1),
        (["checkpoint.every_num_steps=10", "checkpoint.keep_last=2"], 2),
        (["checkpoint.every_num_steps=10", "checkpoint.keep_best=true"], 2),
        (["checkpoint.at_end=false"], 0),
        (["checkpoint.keep_last=9"], 1),
    ],
)
def test_config_estimate_checkpoints_are_counted(overrides, kept):
    config, batch = batch_of(*overrides)
    rollouts = estimate_rollout_bytes(config, batch, 40)
    assert rollouts == 12 * (40 + config.max_answer_tokens) * (
        config.training.num_steps * config.rollouts_per_step + batch.num_evaluations * batch.evaluation_samples
    )
    use = estimate_disk_use(config, config.training, Sizes(), config.training.num_steps, rollout_bytes=rollouts)
    assert use.num_checkpoints == kept
    assert use.checkpoint_bytes == 14_000_000
    assert use.peak_bytes == (kept + (kept > 0)) * 14_000_000 + rollouts


def test_config_estimate_checkpoints_hold_every_critics_masters_and_moments():
    config, batch = batch_of("algorithm.type=asy_ppo")
    equal = estimate_extra_memory(config, Sizes(), batch)
    found = estimate_disk_use(config, config.training, Sizes(), 1, num_other_parameters=equal.num_trained)
    assert found.checkpoint_bytes == 14_000_000 + 2 * 12_000_000
    other = estimate_extra_memory(config, Sizes(), batch, critic_sizes=Sizes(num_parameters=500_000))
    small = estimate_disk_use(config, config.training, Sizes(), 1, num_other_parameters=other.num_trained)
    assert small.checkpoint_bytes == 14_000_000 + 2 * 6_000_000


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("checkpointing", "mlp_slice"), [(False, None), (True, None), (False, 0.5)])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_config_estimate_activations_are_those_that_autograd_keeps(dtype, checkpointing, mlp_slice, kv_heads):
    """Within 10 % of the bytes that a Llama decoder saves for its backward pass, per token and layer."""
    sizes = Sizes(num_kv_heads=kv_heads)
    shallow, deep = (saved_bytes(sizes, layers, dtype, checkpointing, mlp_slice) for layers in (2, 4))
    per_layer = (deep - shallow) / 2 / NUM_TOKENS
    element = {"bfloat16": 2, "float32": 4}[dtype]
    more = Sizes(num_kv_heads=kv_heads, num_layers=4)
    settings = {"checkpointing": checkpointing, "mlp_slice": mlp_slice}
    estimate = sum(estimate_activation_bytes_per_token(more, element, **settings))
    estimate -= sum(estimate_activation_bytes_per_token(sizes, element, **settings))
    assert estimate / 2 == pytest.approx(per_layer, rel=0.1)


def test_config_estimate_activations_of_experts_are_those_that_autograd_keeps():
    """What another chosen expert adds, in a mixture whose products are grouped."""
    inner = 128
    kept = [saved_by_experts(Sizes(), inner, chosen) / NUM_TOKENS for chosen in (2, 4)]
    sizes = [Sizes(intermediate_size=chosen * inner, experts_per_token=chosen) for chosen in (2, 4)]
    estimated = [sum(estimate_activation_bytes_per_token(s, 2, checkpointing=False)) for s in sizes]
    assert estimated[1] - estimated[0] == pytest.approx(kept[1] - kept[0], rel=0.1)


NUM_TOKENS = 64


def saved_by_experts(sizes: Sizes, inner: int, chosen: int) -> int:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        moe_intermediate_size=inner,
        num_experts=8,
        num_experts_per_tok=chosen,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        vocab_size=sizes.vocab_size,
    )
    return kept_bytes(Qwen3MoeForCausalLM(config).bfloat16().train())


def saved_bytes(
    sizes: Sizes, num_layers: int, dtype: str, checkpointing: bool, mlp_slice: float | None, *, fused: bool = False
) -> int:
    """What a forward pass over `NUM_TOKENS` tokens leaves for the backward pass, parameters left out."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from roll.training.memory.activation_checkpointing import tile_mlps
    from roll.training.network.fused import use_fused_kernels

    config = LlamaConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        vocab_size=sizes.vocab_size,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).train()
    if fused and use_fused_kernels(model) == 0:
        pytest.skip("nothing is fused without a compiler")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    if mlp_slice is not None:
        tile_mlps(model, round(NUM_TOKENS * mlp_slice))
    return kept_bytes(model)


def kept_bytes(model) -> int:
    """Of a pass over `NUM_TOKENS` tokens, parameters left out."""
    import torch

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, object] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    embeddings = model.get_input_embeddings()(torch.zeros(1, NUM_TOKENS, dtype=torch.long))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(inputs_embeds=embeddings, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize(
    ("share", "per_group", "tokens"),
    [
        (True, None, 40 + 8 * 32),
        (False, None, 8 * (40 + 32)),
        (True, (1, 2), 40 + 2 * 32),  # the two best, or a pair
        (False, (1, 2), 2 * (40 + 32)),
        (True, (28, 56), 28 * 40 + 56 * 32),  # all pairs of 8
    ],
)
def test_config_estimate_a_step_trains_what_is_learnt_from_its_groups(share, per_group, tokens):
    config = load_config(QUICKSTART, [f"training.share_prefix={str(share).lower()}"])
    numbers = {"longest_prompt": 40, "train_prompts": {"arithmetic": 57}, "held_out_prompts": 24}
    assert compute_run_sizes(config, **numbers, trained_per_group=per_group).trained_tokens == 8 * tokens


def test_config_estimate_an_eighth_of_what_is_alive_lies_free_in_a_heap_that_is_closed() -> None:
    parts = {"weights": 3000, "activations": 1000, "matmul kernels": 800}  # which leave no holes
    assert estimate_heap_bytes(parts, trimmed=True) == {"heap": 500}
    assert estimate_heap_bytes(parts, trimmed=False) == {"heap": 400}


@pytest.mark.parametrize(
    ("overrides", "is_closed"),
    [
        ([], False),
        (["training.malloc_trim=true"], True),
        (["training.activation_checkpointing=true"], True),
        (["training.activation_checkpointing=true", "training.malloc_trim=false"], False),
        (["training.tiled_mlp_tokens=512"], True),
        (["training.optimizer=adamw_8bit"], True),
        (["model.lora.rank=4"], False),
        (["model.lora.rank=4", "model.lora.base=nf4"], True),
        (["training.backend=deepspeed", "training.activation_checkpointing=true"], False),
        (RAY, True),
    ],
)
def test_config_estimate_heaps_are_closed_where_less_memory_is_asked_for(overrides: list[str], is_closed: bool) -> None:
    config = load_config(QUICKSTART, overrides)
    assert should_trim_heap(config.model, config.training, config.num_ranks) is is_closed
    parts = dict(memory_of(*overrides)["actor_train"].parts)
    free = parts.pop("heap")
    alive = sum(parts.values()) - parts["matmul kernels"]
    assert free == round(alive / 8 if is_closed else 0.4 * parts["activations"])


@dataclass(frozen=True)
class Mixture(Sizes):
    """Two layers of 8 experts of 3 matrices of 192 x 64 each, 2 for a token, besides 100,000 weights of each layer."""

    num_parameters: int = 256 * 192 + 2 * (100_000 + 8 * 3 * 192 * 64)
    intermediate_size: int = 2 * 64
    experts_per_token: int = 2
    num_experts: int = 8
    expert_parameters: int = 2 * 8 * 3 * 192 * 64


@pytest.mark.parametrize(
    ("ranks", "ep", "experts"),
    [
        (4, 1, 8),  # a layer with all its experts
        (4, 2, 4),  # half of them, gathered from the two ranks that share them
        (4, 4, 0),  # each rank has two, and no other has a part of these
    ],
)
def test_config_estimate_a_rank_gathers_the_experts_that_ep_leaves_to_it(ranks: int, ep: int, experts: int) -> None:
    parallel = ParallelConfig(ep=ep)
    layer = 100_000 + experts * 3 * 192 * 64
    for learns, on_accelerator, each in ((True, False, 2 + 4), (True, True, 3 * 2 + 4), (False, True, 2 * 2)):
        found = estimate_gathered_bytes(parallel, Mixture(), ranks, 2, is_trained=learns, on_accelerator=on_accelerator)
        assert found == {"gathered weights": each * layer}


def test_config_estimate_a_large_vocabulary_is_gathered_and_added_up_alone():
    sizes = Sizes(vocab_size=4096)
    found = estimate_gathered_bytes(ParallelConfig(), sizes, 2, 2, is_trained=True, on_accelerator=True)
    assert found == {"gathered weights": (2 + 4) * 4096 * 192}


def test_config_estimate_stages_of_several_parts_keep_more_micro_batches_in_flight() -> None:
    """The first of four stages keeps 11 of 8 halves of a quarter of the layers: 11/8 of what one rank keeps."""

    def kept(micro_batches: int = 8, **parallel: int) -> int:
        config = load_config(QUICKSTART, [])
        training = config.training.model_copy(update={"parallel": ParallelConfig(**parallel)})
        places = {"micro_batches": micro_batches, "on_accelerator": True}
        return estimate_forward_backward_bytes(config.model, training, Mixture(num_layers=8), 1000, 4, **places)[
            "activations"
        ]

    assert kept(pp=4) == kept()
    assert kept(pp=4, vpp=2) == round(kept() * 11 / 8)
    assert kept(7, pp=4, vpp=2) == round(kept() * 14 / 8)  # what the order of 7 keeps: the last round is not full


def test_config_estimate_the_first_stage_has_more_than_its_share_where_the_last_has_the_vocabulary_to_compute() -> None:
    """SmolLM2-135M in two stages: 19 layers and the embeddings, for two micro-batches at once; 11 layers and the
    embeddings once more, for one."""
    layer, embedding, layers = 3_540_096, 49_152 * 576, 30
    sizes = Sizes(num_parameters=layers * layer + embedding, num_layers=layers, hidden_size=576, vocab_size=49_152)
    stage = 19 * layer + embedding
    config = load_config(QUICKSTART, [])

    def parts(on_accelerator: bool = True, ranks: int = 2, **parallel: int) -> dict[str, int]:
        training = config.training.model_copy(update={"parallel": ParallelConfig(**parallel)})
        places = {"micro_batches": 8, "on_accelerator": on_accelerator}
        return estimate_training_bytes(config.model, training, sizes, 1000, ranks, **places)

    found, one = parts(pp=2), parts(ranks=1)
    assert one["AdamW"] == 8 * sizes.num_parameters
    assert [found[name] for name in ("master weights", "weights", "gradients", "AdamW")] == pytest.approx(
        [4 * stage, 2 * stage, 4 * stage, 8 * stage], abs=1
    )
    assert found["activations"] == pytest.approx(one["activations"] * 2 * 19 / 30, abs=1)
    shared = parts(ranks=4, pp=2)
    assert (shared["weights"], shared["AdamW"]) == pytest.approx((4 * stage / 2, 8 * stage / 2), abs=1)
    assert estimate_frozen_bytes(sizes, ParallelConfig(pp=2), 2, 2) == pytest.approx(2 * stage, abs=1)
    assert estimate_frozen_bytes(sizes, ParallelConfig(dp_replicate=2), 4, 2) == sizes.num_parameters  # two copies


def test_config_estimate_of_experts_those_that_a_token_goes_through_are_weighed_against_the_vocabulary() -> None:
    """Layers of 1,000 weights of which a token meets 300, and a vocabulary of 600, as much as two layers."""
    sizes = Mixture(
        num_parameters=600 + 8 * 1000, num_layers=8, vocab_size=60, hidden_size=10, expert_parameters=8 * 800,
        experts_per_token=1,
    )  # fmt: skip
    assert compute_peak_stage_fractions(sizes, ParallelConfig(pp=2)) == PeakStageFractions(
        weights=5_600 / 8_600, activations=2 * 5 / 8
    )
    assert compute_peak_stage_fractions(sizes, ParallelConfig()) == PeakStageFractions(weights=1.0, activations=1.0)


@pytest.mark.parametrize(
    ("settings", "ranks", "micro_batches", "fewer"),
    [
        ({}, 2, 1, True),
        ({}, 2, 2, False),  # those of the first micro-batch are there
        ({}, 1, 1, False),  # a copy of the weights in float32 has gradients of its own
        ({"parallel": ParallelConfig(ep=2)}, 2, 1, False),  # so have experts
    ],
)
def test_config_estimate_gradients_take_the_place_of_activations(
    settings: dict[str, Any], ranks: int, micro_batches: int, fewer: bool
) -> None:
    """All but the vocabulary's, which come before the first of them has left."""
    config = load_config(QUICKSTART, [])
    training, sizes = config.training.model_copy(update=settings), Mixture()

    def parts(on_accelerator: bool = False) -> dict[str, int]:
        places = {"micro_batches": micro_batches, "on_accelerator": on_accelerator}
        return estimate_training_bytes(config.model, training, sizes, 1000, ranks, **places)

    places = {"micro_batches": micro_batches, "on_accelerator": False}
    passing = estimate_forward_backward_bytes(config.model, training, sizes, 1000, ranks, **places)["activations"]
    late = 4 * (sizes.num_parameters - 256 * 192) // ranks if fewer else 0
    assert parts()["activations"] == passing - late
    assert parts(on_accelerator=True)["activations"] >= passing


@pytest.mark.parametrize(
    ("sizes", "parallel", "micro_batches", "products"),
    [
        (Sizes(), {}, 2, 2 * 3 * 6),
        (Mixture(), {}, 2, 2 * 3 * (5 + 2 * 2 * 8)),
        (Mixture(), {"ep": 2}, 2, 2 * 3 * (5 + 2 * 2 * 4)),
        (Mixture(), {"pp": 2}, 2, 2 * 3 * (5 + 2 * 1 * 8)),
        (Sizes(), {}, 1000, 1024),
    ],
)
def test_config_estimate_products_of_another_size_have_kernels_of_their_own(
    sizes: Sizes, parallel: dict[str, int], micro_batches: int, products: int
) -> None:
    config = load_config(QUICKSTART, [])
    training = config.training.model_copy(update={"parallel": ParallelConfig(**parallel)})

    def kernels(on_accelerator: bool = False, **changes: Any) -> dict[str, int]:
        model = config.model.model_copy(update=changes)
        return estimate_kernel_bytes(model, training, sizes, micro_batches, on_accelerator=on_accelerator)

    assert kernels() == {"matmul kernels": round(0.57 * 2**20 * products)}
    adapted = min(products + 3 * 5 * micro_batches, 1024)
    assert kernels(lora=LoRAConfig(rank=4)) == {"matmul kernels": round(0.57 * 2**20 * adapted)}
    assert kernels(dtype="float32") == {}
    assert kernels(on_accelerator=True) == {}


@pytest.mark.parametrize(
    ("overrides", "copied"),
    [
        (["checkpoint.asynchronous=true", "checkpoint.every_num_steps=5"], 12_000_000),
        (["checkpoint.asynchronous=true"], None),  # at the end nothing goes on beside it
        (["checkpoint.every_num_steps=5"], None),
    ],
)
def test_config_estimate_a_checkpoint_that_is_written_beside_training_is_a_copy_of_masters_and_moments(
    overrides: list[str], copied: int | None
) -> None:
    assert memory_of(*overrides)["actor_train"].parts.get("copy that is written") == copied
    assert "copy that is written" not in memory_of(*overrides, on_accelerator=True)["actor_train"].parts
    if copied:
        two = memory_of(*overrides, *RAY, "training.optimizer=adamw_8bit", "algorithm.type=ppo")
        assert {two[role].parts["copy that is written"] for role in ("actor_train", "critic")} == {
            (4_000_000 + 2_000_000 + 8 * 1_000_000 // 256) // 2
        }


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_config_estimate_fused_norms_and_gates_keep_less(kv_heads: int) -> None:
    """As `test_config_estimate_activations_are_those_that_autograd_keeps`, beside what attention keeps there too."""
    sizes = Sizes(num_kv_heads=kv_heads)
    plain, fused = (
        saved_bytes(sizes, 4, "bfloat16", False, None, fused=fused)
        - saved_bytes(sizes, 2, "bfloat16", False, None, fused=fused)
        for fused in (False, True)
    )
    estimated = [
        sum(estimate_activation_bytes_per_token(sizes, 2, checkpointing=False, fused=fused)) for fused in (False, True)
    ]
    assert estimated[0] - estimated[1] == pytest.approx((plain - fused) / NUM_TOKENS, rel=0.1)


def test_config_estimate_adapters_keep_what_lies_between_their_matrices_also_where_the_rest_is_offloaded() -> None:
    """Of 7 linear layers of a decoder layer, or of attention's 4 where MLPs are experts; bfloat16."""

    def kept(sizes: Any, rank: int, *, offloaded: bool = False) -> int:
        settings = {"checkpointing": False, "offloaded": offloaded, "lora_rank": rank}
        return estimate_activation_bytes_per_token(sizes, 2, **settings)[0]

    for sizes, adapters in ((Sizes(), 7), (Mixture(), 4)):
        own = 2 * 2 * 16 * adapters  # layers, bytes, rank
        assert kept(sizes, 16) - kept(sizes, 0) == own
        assert (kept(sizes, 16, offloaded=True), kept(sizes, 0, offloaded=True)) == (own, 0)


def test_config_estimate_of_an_offloaded_layer_its_input_and_what_a_gate_needs_pass() -> None:
    """A hidden vector, and 4 vectors inside an MLP with one gradient; of half of the tokens, where MLPs take those."""
    settings = {"checkpointing": False, "offloaded": True}
    assert estimate_activation_bytes_per_token(Sizes(), 2, **settings) == (0, 2 * 192 + 2 * 5 * 512)
    assert estimate_activation_bytes_per_token(Sizes(), 2, mlp_slice=0.5, **settings) == (0, 2 * 192 + 2 * 5 * 512 // 2)


def test_config_estimate_a_slice_of_more_tokens_than_there_are_is_all_of_them() -> None:
    config = load_config(QUICKSTART, [])

    def passing(tokens: int) -> dict[str, int]:
        training = config.training.model_copy(update={"tiled_mlp_tokens": tokens})
        return estimate_forward_backward_bytes(
            config.model, training, Sizes(), 1000, 1, micro_batches=1, on_accelerator=True
        )

    assert passing(5000) == passing(1000)
    assert passing(500)["a layer"] == passing(1000)["a layer"] // 2


def test_config_estimate_ranks_that_share_a_row_have_a_part_of_its_activations() -> None:
    config = load_config(QUICKSTART, [])

    def kept(**parallel: int) -> int:
        training = config.training.model_copy(update={"parallel": ParallelConfig(**parallel)})
        places = {"micro_batches": 1, "on_accelerator": True}
        return estimate_forward_backward_bytes(config.model, training, Sizes(), 1000, 4, **places)["activations"]

    assert kept(cp=2) == kept(tp=2) == kept() // 2
    assert kept(cp=2, tp=2) == kept() // 4


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (100, 100 * 50_000 * (8 + 2)),  # all at once: in float32 with a gradient, and in bfloat16
        (4_000, 128 * 2**20 + 4_000 * 50_000 * 2),  # a chunk with its gradient, and all that are kept
        (10_000, 384 * 2**20),  # a chunk with its gradient, and 256 MiB
    ],
)
def test_config_estimate_of_logits_a_chunk_is_there_and_what_is_kept_of_them(tokens: int, expected: int) -> None:
    sizes = Sizes(vocab_size=50_000)
    assert estimate_logit_bytes(sizes, tokens, 2) == expected
    assert estimate_logit_bytes(sizes, tokens, 2, layer_bytes=1000) == estimate_logit_bytes(sizes, tokens, 2) - 1000
    assert estimate_logit_bytes(sizes, tokens, 2, layer_bytes=10**10) == 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", ["Gemma3", "Glm4", "Llama", "Olmo2", "Qwen3"])
def test_config_estimate_other_norms_and_gates_than_llama_s_are_counted(
    tiny_model: Path, tmp_path: Path, family: str, fused: bool
) -> None:
    """Those of queries and keys, four in a layer, what adds 1 to a weight, and a gate in one matrix with its twin."""
    import transformers

    from roll.training.network.fused import use_fused_kernels

    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    kept, estimated = [], []
    for layers in (2, 4):
        sizes = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2}
        config = config_class(**sizes, head_dim=32, num_hidden_layers=layers, vocab_size=256, pad_token_id=0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16().train()
        directory = shutil.copytree(tiny_model, tmp_path / str(layers))  # for its tokenizer
        model.save_pretrained(directory)
        if fused and use_fused_kernels(model) == 0 and family != "Gemma3":
            pytest.skip("nothing is fused without a compiler")
        kept.append(kept_bytes(model) / NUM_TOKENS)
        found = describe_model(directory)
        estimated.append(sum(estimate_activation_bytes_per_token(found, 2, checkpointing=False, fused=fused)))
    assert estimated[1] - estimated[0] == pytest.approx(kept[1] - kept[0], rel=0.12), (kept, estimated)
