"""The roofline by hand, and descriptions of hardware and models."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.devices import DEVICES_FILE, read_shipped_entries
from roll.errors import ConfigError
from roll.simulation.costs import compute_engine_costs, compute_kv_capacity, compute_sync_s, compute_train_s
from roll.simulation.hardware import MODELS_FILE, Device, Model, load_device, load_model_sizes

TOY = Model(
    name="toy",
    parameters=1e9,
    active_parameters=1e9,
    num_layers=10,
    hidden_size=1000,
    intermediate_size=4000,
    vocab_size=32000,
    num_heads=10,
    num_kv_heads=2,
    head_dim=100,
)
CHIP = Device(
    name="chip",
    flops=100e12,
    memory_bandwidth=1e12,
    memory_bytes=10e9,
    link_bandwidth=100e9,
    network_bandwidth=10e9,
    compute_efficiency=0.5,
    bandwidth_efficiency=0.8,
    training_efficiency=0.4,
    step_overhead_s=0.001,
    request_overhead_s=0.00002,
    collective_latency_s=10e-6,
    sync_overhead_s=0.5,
)


def test_simulation_costs_a_step_by_hand() -> None:
    costs = compute_engine_costs(TOY, CHIP, 1)
    assert costs.weights_s == pytest.approx(2e9 / 0.8e12)  # 2.5 ms
    assert costs.token_s == pytest.approx(2e9 / 50e12)  # 40 us: from 62.5 tokens on, arithmetic is the limit
    kv = 2 * 10 * 2 * 100 * 2  # keys and values, 10 layers, 2 heads of 100, 2 bytes: 8,000 bytes a token
    assert costs.context_s == pytest.approx(kv / 0.8e12)
    assert costs.compute_decode_s(10) == pytest.approx(0.001 + 10 * 0.00002 + 0.0025)
    assert costs.compute_decode_s(100) == pytest.approx(0.001 + 0.002 + 0.004)
    assert costs.compute_step_s(100, 0, 50_000, 0) == pytest.approx(0.001 + 0.002 + 0.004 + 50_000 * 1e-8)
    # 1,000 prompt tokens: 1,000 x 1,000 / 2 pairs of 4 x 10 layers x width 1,000 FLOPs
    assert costs.compute_step_s(0, 1000, 0, 500_000) == pytest.approx(0.001 + 0.04 + 500_000 * 40_000 / 50e12)


def test_simulation_costs_tensor_parallelism_divides_the_work_and_adds_communication() -> None:
    one, four = compute_engine_costs(TOY, CHIP, 1), compute_engine_costs(TOY, CHIP, 4)
    assert four.weights_s == pytest.approx(one.weights_s / 4)
    assert four.context_s == pytest.approx(one.context_s / 4)
    assert four.overhead_s == pytest.approx(one.overhead_s + 20 * 10e-6)  # two all-reduces in each of 10 layers
    # a ring moves 2 x 3/4 of 1,000 values of 2 bytes, 20 times a token
    assert four.communication_s == pytest.approx(20 * 2 * 0.75 * 2000 / 100e9)


def test_simulation_costs_the_cache_gets_what_the_weights_leave() -> None:
    assert compute_kv_capacity(TOY, CHIP, 1, 0.9) == (9_000_000_000 - 2_000_000_000) // 8000
    assert compute_kv_capacity(TOY, CHIP, 2, 0.9) == (18_000_000_000 - 2_000_000_000) // 8000
    assert compute_kv_capacity(TOY, CHIP, 1, 0.1) <= 0


def test_simulation_costs_training_and_sync_by_hand() -> None:
    # 3 passes x 1e6 tokens x (2e9 + 4 x 10 x 1,000 x 2,000 / 2) FLOPs on 8 chips at 40 TFLOP/s
    assert compute_train_s(TOY, CHIP, 8, 1_000_000, 2000, passes=3) == pytest.approx(3e6 * (2e9 + 4e7) / (8 * 40e12))
    assert compute_sync_s(TOY, CHIP, colocated=True) == pytest.approx(0.5 + 2e9 / 100e9)
    assert compute_sync_s(TOY, CHIP, colocated=False) == pytest.approx(0.5 + 2e9 / 10e9)


def test_simulation_costs_a_quantised_sync_sends_a_byte_less_of_every_linear_weight() -> None:
    small = TOY.model_copy(update={"parameters": 1.2e9, "active_parameters": 0.7e9, "intermediate_size": 4000})
    # 10 layers of 1,000 x (10 + 10 + 2 + 2 heads of 100 + 3 x 4,000), and 0.5e9 of experts that a token does not meet
    linear = 10 * 1000 * (2400 + 12000) + 0.5e9
    sent = 1.2e9 * 2 - linear
    assert compute_sync_s(small, CHIP, colocated=False, quantized=True) == pytest.approx(0.5 + sent / 10e9)


@pytest.mark.parametrize("name", read_shipped_entries(DEVICES_FILE))
def test_simulation_costs_every_device_that_comes_along_is_complete(name: str) -> None:
    found = load_device(name)
    assert 0 < found.compute_efficiency < 1 and 0 < found.bandwidth_efficiency < 1 and 0 < found.training_efficiency < 1
    assert found.network_bandwidth <= found.link_bandwidth <= found.memory_bandwidth


@pytest.mark.parametrize("name", read_shipped_entries(MODELS_FILE))
def test_simulation_costs_every_models_parameters_agree_with_its_sizes(name: str) -> None:
    m = load_model_sizes(name)
    attention = m.hidden_size * m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
    body = m.num_layers * (attention + 3 * m.hidden_size * m.intermediate_size)
    tied, untied = body + m.vocab_size * m.hidden_size, body + 2 * m.vocab_size * m.hidden_size
    assert min(abs(m.parameters / size - 1) for size in (tied, untied)) < 0.01


def test_simulation_costs_the_devices_and_models_of_the_issue_are_there() -> None:
    assert {"h200", "h100", "h800", "h20", "a100", "cpu"} <= set(read_shipped_entries(DEVICES_FILE))
    assert {"qwen3-8b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "smollm2-135m"} <= set(
        read_shipped_entries(MODELS_FILE)
    )


def test_simulation_costs_a_device_of_ones_own(tmp_path: Path) -> None:
    fields = CHIP.model_dump(exclude={"name"}, exclude_none=True)
    path = tmp_path / "chip.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in fields.items()))
    assert load_device(str(path)) == CHIP


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flops: 1", "missing key 'memory_bandwidth'"),
        ("flps: 1", "unknown key 'flps'.*Did you mean 'flops'"),
        ("flops: fast", "'flops'.*:1. must be a number > 0, got 'fast'"),
        ("flops: 0", "'flops'.*:1. must be a number > 0, got 0"),
        ("- 1", "expected keys and values"),
        ("a: [", "not valid YAML"),
    ],
)
def test_simulation_costs_a_device_file_with_a_mistake_says_which(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "chip.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        load_device(str(path))


def test_simulation_costs_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown device 'h20O'.*Known: h200, h100"):
        load_device("h20O")
    with pytest.raises(ConfigError, match=r"model file 'nowhere.yaml' cannot be read"):
        load_model_sizes("nowhere.yaml")
