"""`roll plan` of runs, of models by their config.json, and of mixtures of experts."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from unit.simulation.run_helpers import steady
from worlds.published_configs import PUBLISHED

from roll.cli.main import run
from roll.config.distributions import UniformDistribution, compute_mean
from roll.errors import ConfigError, ModelError
from roll.models.hub_fetch import TIMEOUT_S
from roll.simulation.costs import compute_engine_costs
from roll.simulation.experts import choose_expert_parallel, compute_expert_traffic_s
from roll.simulation.hardware import Device, Model, load_device, load_model_sizes
from roll.simulation.memory import find_memory_problem
from roll.simulation.plan_sources import read_plan_source

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[3] / "examples"


def write_config(directory: Path, name: str) -> Path:
    """Write a published config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "config.json"
    file.write_text(json.dumps(PUBLISHED[name][0]))
    return file


@pytest.mark.parametrize("name", PUBLISHED)
def test_plan_sources_plan_counts_the_parameters_of_published_models(name: str, tmp_path: Path) -> None:
    _, parameters, active = PUBLISHED[name]
    found = load_model_sizes(str(write_config(tmp_path, name)))
    assert found.num_parameters == parameters
    assert found.active_parameters == pytest.approx(active, rel=0.13)  # authors round, and leave out embeddings


def test_plan_sources_plan_takes_a_hub_name_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "allenai/OLMoE-1B-7B-0924"
    cache = tmp_path / "models--allenai--OLMoE-1B-7B-0924"
    write_config(cache / "snapshots" / "abc", name)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = read_plan_source(name)
    assert found.config.model == name
    assert found.config.placement.num_devices == 2  # 7 billion weights with optimizer states are 111 GB


def test_plan_sources_plan_gives_up_a_hub_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The hub's client would try again for half a minute, and write of each attempt."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("roll.models.hub_fetch.TIMEOUT_S", 0.5)
        with pytest.raises(ModelError, match=r"'no-such/model' .* \(the hub did not respond within 0\.5 s\): copy the"):
            load_model_sizes("no-such/model")
    assert capfd.readouterr() == ("", "")
    assert TIMEOUT_S <= 10


def test_plan_sources_plan_quotes_the_client_of_a_hub_that_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # of the process that asks
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError, match=r"could not be fetched \(An error happened .*\): copy the"):
        load_model_sizes("no-such/model")


def test_plan_sources_plan_refuses_a_hub_name_that_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"the config.json of 'no-such/model' is not in the hub's cache"):
        read_plan_source("no-such/model")


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_plan_sources_plan_reads_every_example(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    found = read_plan_source(str(file.relative_to(EXAMPLES.parent)))
    model, device = load_model_sizes(found.config.model), load_device(found.config.device)
    assert find_memory_problem(found.config, model, device, found.trainer) == ""
    origins = {constant.origin.split(":")[0].split(";")[0] for constant in found.constants}
    assert origins <= {"given", "measured", "published", "assumed"} and "assumed" in origins


def test_plan_sources_plan_of_a_run_measures_its_prompts_and_keeps_its_batch() -> None:
    found = read_plan_source(str(EXAMPLES / "quickstart.yaml"), device_name="h100", num_devices=8)
    config = found.config
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.rollout.max_new_tokens) == (8, 8, 32)
    assert 30 < compute_mean(config.prompt_tokens) < 60
    assert config.placement.num_devices == 8 and config.training.share_prefix
    prompts = next(constant for constant in found.constants if constant.name == "prompt length")
    assert prompts.origin.startswith("measured: 64 prompts")


def test_plan_sources_plan_of_a_supervised_run_has_no_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(EXAMPLES / "sft.yaml"), "--device", "h100", "--devices", "2"]) == 0
    shown = capsys.readouterr().out
    assert "16 examples a step; no engines" in shown and "Plan: 2 trainer ranks" in shown
    assert "tokens of an example" in shown and "actor_infer" not in shown


def test_plan_sources_plan_prints_the_origin_of_every_constant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(tmp_path, "allenai/OLMoE-1B-7B-0924")
    few = ["rollout.prompts_per_step=8", "rollout.max_new_tokens=512"]
    assert run(["plan", str(file), "--devices", "2", *few]) == 0
    shown = capsys.readouterr().out
    assert "given: rollout.prompts_per_step, rollout.max_new_tokens" in shown
    assert "h100.training_efficiency" in shown and "published: the vendor's data sheet" in shown
    assert "parallel: {ep: 2}" in shown and "Expert-parallel sizes, best first" in shown


def test_plan_sources_plan_lists_what_it_assumes_of_updates_rewards_and_agents() -> None:
    found = {constant.name: constant for constant in read_plan_source(str(EXAMPLES / "agent.yaml")).constants}
    assert found["an agent's work"].value == "one request, 0 s" and "assumed" in found["an agent's work"].origin
    assert (found["latency of rewards"].value, found["latency of rewards"].origin) == ("0 s", "assumed")
    assert (found["overhead of an update"].value, found["overhead of an update"].origin) == ("1 s", "assumed")
    assert found["compute of an update"].value.startswith("3 forward passes")
    supervised = {c.name: c.value for c in read_plan_source(str(EXAMPLES / "sft.yaml")).constants}
    assert supervised["overhead of an update"] == "0.1 s" and "latency of rewards" not in supervised


def test_plan_sources_plan_refuses_what_is_neither_a_file_nor_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "qwen2.5-7"]) == 2
    assert "Did you mean 'qwen2.5-7b'?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--devices must be between 1 and 4,096, got 0"):
        read_plan_source("qwen2.5-7b", num_devices=0)
    with pytest.raises(ConfigError, match="unknown device 'h10'"):
        read_plan_source("qwen2.5-7b", device_name="h10")


def test_plan_sources_plan_refuses_a_config_that_transformers_cannot_build(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense", "hidden_size": 8}')
    with pytest.raises(ModelError, match=r"transformers cannot create .*'nonsense'"):
        read_plan_source(str(tmp_path))


@pytest.mark.parametrize("missing", ["num_experts", "num_experts_per_tok"])
def test_plan_sources_plan_refuses_a_config_that_does_not_say_how_many_experts(tmp_path: Path, missing: str) -> None:
    file = write_config(tmp_path, "Qwen/Qwen3-30B-A3B")
    file.write_text(
        json.dumps({key: value for key, value in PUBLISHED["Qwen/Qwen3-30B-A3B"][0].items() if key != missing})
    )
    with pytest.raises(ModelError, match="does not contain their number"):
        read_plan_source(str(file))


MOE = Model(
    name="moe", parameters=1000e6, num_layers=10, hidden_size=100, intermediate_size=200, vocab_size=1000, num_heads=4,
    num_kv_heads=4, head_dim=25, num_experts=8, experts_per_token=2, expert_parameters=800_000_000,
    active_parameters=400e6,
)  # fmt: skip


def round_device() -> Device:
    """Return a device whose rates are round numbers."""
    rates = {"link_bandwidth": 1e9, "network_bandwidth": 1e8, "memory_bandwidth": 1e9, "bandwidth_efficiency": 1.0}
    return load_device("h100").model_copy(update=rates)


def test_plan_sources_plan_expert_traffic_by_hand() -> None:
    device = round_device()
    # without ep: two gathers in 2 bytes and gradients in 4 of all 1e9 weights, for each of 3 micro-batches
    alone = compute_expert_traffic_s(MOE, device, ranks=8, ep=1, tokens_per_rank=5000, micro_batches=3)
    assert alone == pytest.approx(3 * 1e9 * 8 / 1e9)
    # with 4: a quarter of the experts is gathered; 6 all-to-alls of 2 vectors of 100 numbers a layer, 3/4 of them leave
    some = compute_expert_traffic_s(MOE, device, ranks=8, ep=4, tokens_per_rank=5000, micro_batches=3)
    assert some == pytest.approx(3 * (200e6 + 200e6) * 8 / 1e9 + 6 * 5000 * 10 * 2 * 100 * 2 * 0.75 / 1e9)
    # with 8, no other rank has the same experts; between machines the network carries what is gathered
    all_ranks = compute_expert_traffic_s(MOE, device, ranks=16, ep=16, tokens_per_rank=5000, micro_batches=3)
    assert all_ranks == pytest.approx(3 * 200e6 * 8 / 1e8 + 6 * 5000 * 10 * 2 * 100 * 2 * 15 / 16 / 1e8)


def test_plan_sources_plan_expert_parallel_prefers_what_fits() -> None:
    config = steady({"placement.generation": 8, "device": "h100", "rollout.max_new_tokens": 1000})
    roomy = choose_expert_parallel(config, MOE, load_device("h100"))
    assert sorted(choice.size for choice in roomy) == [1, 2, 4, 8] and all(choice.fits for choice in roomy)
    assert roomy[0].traffic_s == min(choice.traffic_s for choice in roomy)
    least = min(choice.memory_bytes for choice in roomy)
    tight = load_device("h100").model_copy(update={"memory_bytes": (least + 1) / 0.9})
    found = choose_expert_parallel(config, MOE, tight)
    assert found[0].fits and found[0].memory_bytes == least and not found[-1].fits
    assert choose_expert_parallel(config, load_model_sizes("qwen3-8b"), tight) == ()


def test_plan_sources_plan_decoding_reads_the_experts_that_some_token_chose() -> None:
    costs = compute_engine_costs(MOE, round_device().model_copy(update={"flops": 1e30, "step_overhead_s": 0.0}), 1)
    # one token: 200 million shared weights and a quarter of 800 million, in 2 bytes, at 1 GB/s
    assert costs.compute_decode_s(1) == pytest.approx(0.8)
    # two tokens miss an expert with probability 0.75^2
    assert costs.compute_decode_s(2) == pytest.approx(0.4 + 1.6 * (1 - 0.75**2))
    assert costs.compute_decode_s(1000) == pytest.approx(2.0)


def test_plan_sources_plan_models_with_incomplete_experts_are_refused(tmp_path: Path) -> None:
    tree = MOE.model_dump(exclude={"name", "experts_per_token"}, exclude_none=True)
    file = tmp_path / "moe.yaml"
    file.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="must be set together"):
        load_model_sizes(str(file))


def test_plan_sources_plan_mean_of_a_cut_distribution() -> None:
    assert compute_mean(UniformDistribution(low=0, high=10)) == pytest.approx(5)
    assert compute_mean(UniformDistribution(low=0, high=10), 5) == pytest.approx(3.75)  # half of it 2.5, half of it 5
