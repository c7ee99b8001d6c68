"""The vllm engine on a tiny random model, against transformers on the same weights."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from worlds.tiny_model import write_tiny_model

from roll.errors import DataError, EngineDiedError, ModelError, UnsupportedError, WeightSyncError
from roll.inference import EngineSpec, build_engine, prestart_engine, resolve_engine_kind
from roll.inference.vllm import VLLMEngine, prefork
from roll.models import list_linear_weights, load_causal_lm, to_checkpoint_tensors
from roll.types import Generation, GenerationRequest, IntArray, SamplingParams, TensorSpec, WeightUpdate
from roll.weights.quantization import QuantizedWeights, dequantize_stream, find_quantized_dtype
from roll.weights.shared_memory import SharedMemorySender

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

MAX_CONTEXT = 192
PROMPT = np.arange(40, 60, dtype=np.int32)
EOS = 2


def make_spec(model: Path, log: Path, **changes: object) -> EngineSpec:
    spec = EngineSpec(
        engine_id="engine-0", kind="vllm", model_path=str(model), dtype="float32", max_context=MAX_CONTEXT,
        max_num_seqs=16, kv_cache_bytes=8 * 2**20, num_threads=1, log_path=log,
    )  # fmt: skip
    return replace(spec, **changes)  # type: ignore[arg-type]


def request(name: str, prompt: IntArray = PROMPT, **sampling: object) -> GenerationRequest:
    params = SamplingParams(**({"max_new_tokens": 12, "seed": 7} | sampling))  # type: ignore[arg-type]
    return GenerationRequest(request_id=name, token_ids=prompt, sampling=params)


class Policy:
    """The trainer's side: a transformers model whose weights change and are offered to the engine."""

    def __init__(self, directory: Path) -> None:
        self.model = load_causal_lm(directory, torch.float32)
        self.sender = SharedMemorySender()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield from to_checkpoint_tensors(self.model, name, parameter.detach()).items()

    def names(self) -> list[str]:
        return [name for name, _ in self]

    @torch.no_grad()
    def change(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))

    def offer(self, version: int) -> WeightUpdate:
        update = self.sender.stage(self, version)
        assert update is not None
        return update

    @torch.no_grad()
    def logits(self, tokens: IntArray) -> torch.Tensor:
        """[L, V]"""
        return self.model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].double()

    def logprobs(self, tokens: IntArray, temperature: float = 1.0) -> np.ndarray:
        """[L]; entry 0 is 0."""
        scores = (self.logits(tokens) / temperature).log_softmax(-1)[:-1]
        own = scores.gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
        return np.concatenate([[0.0], own.numpy()])


def whole(prompt: IntArray, generation: Generation) -> IntArray:
    return np.concatenate([prompt, generation.token_ids])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), hidden=128, tied=False, context_length=MAX_CONTEXT)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs") / "infer-0.log"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path, log: Path) -> AsyncIterator[VLLMEngine]:
    engine = build_engine(make_spec(model, log))
    assert isinstance(engine, VLLMEngine)
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def policy(model: Path, engine: VLLMEngine) -> AsyncIterator[Policy]:
    """The weights that the engine started with; the engine gets them back after the test."""
    yield Policy(model)
    await engine.update_weights(Policy(model).offer(0))


async def until_running(engine: VLLMEngine, num_tokens: int = 1) -> None:
    """Wait until vLLM has made some tokens of every request."""

    async def poll() -> None:
        while engine.load().num_running == 0:
            await asyncio.sleep(0.005)
        for _ in range(num_tokens):
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), 60)


async def test_vllm_engine_auto_is_vllm_where_it_is_installed() -> None:
    assert resolve_engine_kind("auto") == "vllm"


async def test_vllm_engine_a_seed_determines_the_answer_whatever_its_neighbours_are(engine: VLLMEngine) -> None:
    alone = await engine.generate(request("alone"))
    crowd = await asyncio.gather(*(engine.generate(request(f"crowd-{seed}", seed=seed)) for seed in range(10)))
    assert crowd[7].token_ids.tolist() == alone.token_ids.tolist()
    assert len({tuple(generation.token_ids.tolist()) for generation in crowd}) == 10


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_vllm_engine_logprobs_are_those_of_the_sampling_distribution(
    engine: VLLMEngine, policy: Policy, temperature: float
) -> None:
    generation = await engine.generate(request("sampled", temperature=temperature, max_new_tokens=30))
    expected = policy.logprobs(whole(PROMPT, generation), temperature)[len(PROMPT) :]
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
    assert generation.finish_reason == "length"
    assert generation.policy_versions.tolist() == [0] * 30
    assert generation.engine_id == "engine-0"


async def test_vllm_engine_top_k_logprobs_are_normalised_over_the_k_tokens(engine: VLLMEngine, policy: Policy) -> None:
    generation = await engine.generate(request("top", top_k=5, max_new_tokens=20))
    scores = policy.logits(whole(PROMPT, generation))[len(PROMPT) - 1 : -1]
    for row, token, logprob in zip(scores, generation.token_ids, generation.logprobs, strict=True):
        best = row.topk(5)
        assert int(token) in best.indices.tolist()
        assert logprob == pytest.approx(float(row[int(token)] - best.values.logsumexp(0)), abs=1e-4)


async def test_vllm_engine_a_choice_among_few_tokens_weighs_each_of_them_alone(
    engine: VLLMEngine, policy: Policy
) -> None:
    choices = (70, 41, 9)
    generation = await engine.generate(request("choice", max_new_tokens=2, temperature=0.0, choices=choices))
    whole = np.concatenate([PROMPT, generation.token_ids])
    allowed = policy.logits(whole)[len(PROMPT) - 1 : -1][:, list(choices)].log_softmax(-1).numpy()
    assert generation.choice_logprobs == pytest.approx(allowed, abs=1e-4)
    assert generation.token_ids.tolist() == [choices[i] for i in allowed.argmax(-1)]
    assert generation.logprobs == pytest.approx(allowed.max(-1), abs=1e-4)


async def test_vllm_engine_a_token_is_where_the_requests_own_random_number_falls_in_the_distribution(
    engine: VLLMEngine, policy: Policy
) -> None:
    """So that an answer tells that the engine draws by inversion, with one number for each token."""
    choices = tuple(range(3, 203, 20))
    asked = request("inverted", seed=11, max_new_tokens=6, temperature=2.0, choices=choices)
    generation = await engine.generate(asked)
    numbers = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    whole = np.concatenate([np.array(PROMPT, np.int32), generation.token_ids])
    logits = policy.logits(whole)[len(PROMPT) - 1 : -1][:, list(choices)] / 2.0
    totals = logits.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(totals, numbers[: len(totals), None], right=True)[:, 0]
    assert generation.token_ids.tolist() == [choices[i] for i in expected]


async def test_vllm_engine_greedy_takes_the_likeliest_token_and_reports_temperature_one(
    engine: VLLMEngine, policy: Policy
) -> None:
    generation = await engine.generate(request("greedy", temperature=0.0, seed=None))
    tokens = whole(PROMPT, generation)
    best = policy.logits(tokens).argmax(-1)[len(PROMPT) - 1 : -1]
    assert generation.token_ids.tolist() == best.tolist()
    np.testing.assert_allclose(generation.logprobs, policy.logprobs(tokens)[len(PROMPT) :], atol=1e-4)


async def test_vllm_engine_only_the_requests_own_stop_tokens_end_it_and_the_stop_token_is_kept(
    engine: VLLMEngine,
) -> None:
    free = await engine.generate(request("free", max_new_tokens=150))
    assert free.finish_reason == "length"
    assert EOS in free.token_ids[:-1].tolist(), "the model's own end token must not end a request that does not name it"
    stop = int(free.token_ids[5])
    stopped = await engine.generate(request("stopped", max_new_tokens=150, stop_token_ids=(stop,)))
    end = free.token_ids.tolist().index(stop) + 1
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == free.token_ids[:end].tolist()
    assert len(stopped.logprobs) == len(stopped.policy_versions) == end


async def test_vllm_engine_scores_of_given_tokens_equal_transformers(engine: VLLMEngine, policy: Policy) -> None:
    generator = np.random.default_rng(0)
    sequences = [generator.integers(4, 260, length).astype(np.int32) for length in (1, 2, 33, 64, MAX_CONTEXT)]
    scores = await engine.logprobs([*sequences, sequences[2]])
    for sequence, score in zip(sequences, scores, strict=False):
        assert score.dtype == np.float32 and score[0] == 0.0
        np.testing.assert_allclose(score, policy.logprobs(sequence), atol=1e-4)
    np.testing.assert_allclose(scores[-1], scores[2], atol=1e-5)


async def test_vllm_engine_an_aborted_request_returns_what_it_has(engine: VLLMEngine) -> None:
    full = await engine.generate(request("full", max_new_tokens=160))
    task = asyncio.create_task(engine.generate(request("cut", max_new_tokens=160)))
    await until_running(engine)
    await engine.abort(["cut", "unknown"])
    cut = await task
    assert cut.finish_reason == "abort" and 0 < len(cut.token_ids) < 160
    assert cut.token_ids.tolist() == full.token_ids[: len(cut.token_ids)].tolist()
    assert len(cut.logprobs) == len(cut.policy_versions) == len(cut.token_ids)


async def test_vllm_engine_a_kept_request_continues_as_if_nothing_had_happened(engine: VLLMEngine) -> None:
    full = await engine.generate(request("full", max_new_tokens=120))
    task = asyncio.create_task(engine.generate(request("kept", max_new_tokens=120)))
    await until_running(engine)
    await engine.pause("keep")
    late = asyncio.create_task(engine.generate(request("late")))
    done, _ = await asyncio.wait({task, late}, timeout=0.3)
    assert not done, "nothing is generated while paused"
    await engine.resume()
    kept = await task
    assert kept.token_ids.tolist() == full.token_ids.tolist()
    assert (await late).finish_reason == "length"


async def test_vllm_engine_pause_abort_ends_requests_and_pause_drain_lets_them_finish(engine: VLLMEngine) -> None:
    task = asyncio.create_task(engine.generate(request("ended", max_new_tokens=160)))
    await until_running(engine)
    await engine.pause("abort")
    assert (await task).finish_reason == "abort"
    await engine.resume()
    task = asyncio.create_task(engine.generate(request("drained", max_new_tokens=100)))
    await until_running(engine)
    await engine.pause("drain")
    assert (await asyncio.wait_for(task, 1)).finish_reason == "length"
    await engine.resume()


async def test_vllm_engine_load_counts_running_and_waiting_requests(engine: VLLMEngine) -> None:
    idle = engine.load()
    assert (idle.num_running, idle.num_waiting, idle.kv_used, idle.capacity) == (0, 0, 0.0, 16)
    tasks = [asyncio.create_task(engine.generate(request(f"load-{i}", max_new_tokens=100))) for i in range(20)]
    await until_running(engine, num_tokens=10)
    load = engine.load()
    await asyncio.gather(*tasks)
    assert load.num_running <= 16 and load.num_running + load.num_waiting == 20 and load.num_waiting >= 4
    assert 0 < load.kv_used <= 1
    assert load.num_steps is not None and idle.num_steps is not None and load.num_steps > idle.num_steps


async def test_vllm_engine_an_update_changes_the_policy_and_is_confirmed(
    engine: VLLMEngine, policy: Policy, log: Path
) -> None:
    before = await engine.generate(request("before"))
    policy.change(seed=1)
    receipt = await engine.update_weights(policy.offer(3))
    assert receipt.engine_id == "engine-0" and receipt.policy_version == 3
    assert receipt.checksums == policy.sender.send() and set(receipt.checksums) == set(policy.names())
    after = await engine.generate(request("after"))  # the same prompt: a stale prefix cache would show
    assert after.policy_versions.tolist() == [3] * 12
    assert after.token_ids.tolist() != before.token_ids.tolist()
    np.testing.assert_allclose(after.logprobs, policy.logprobs(whole(PROMPT, after))[len(PROMPT) :], atol=1e-4)
    if not torch.cuda.is_available():
        assert "weight syncs load tensors directly into the layers" in log.read_text()


async def check_codes(engine: VLLMEngine, policy: Policy, model: Path, form: str) -> None:
    """Codes make the engine compute, bit for bit, what the weights do that are read back of them."""
    before = await engine.logprobs([PROMPT])
    source = QuantizedWeights(policy, form, list_linear_weights(str(model)))
    sent = policy.sender.stage(source, 1)
    assert sent is not None and find_quantized_dtype(sent.manifest) is not None
    receipt = await engine.update_weights(sent)
    assert receipt.checksums == policy.sender.send() and set(receipt.checksums) == set(source.names())
    in_codes = await engine.logprobs([PROMPT])
    back = {n: t.clone() for n, t in dequantize_stream(iter(source), sent.manifest, torch.float32)}
    for name, parameter in policy.model.named_parameters():
        for own, view in to_checkpoint_tensors(policy.model, name, parameter.data).items():
            view.copy_(back[own])
    await engine.update_weights(policy.offer(2))
    (plain,) = await engine.logprobs([PROMPT])
    assert in_codes[0].tobytes() == plain.tobytes() != before[0].tobytes()
    np.testing.assert_allclose(plain, policy.logprobs(PROMPT), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "fp8"])
async def test_vllm_engine_weights_in_codes_are_computed_with_as_they_are_read_back(
    engine: VLLMEngine, policy: Policy, model: Path, form: str
) -> None:
    await check_codes(engine, policy, model, form)


@pytest.mark.parametrize("explicit_pause", [False, True])
async def test_vllm_engine_an_update_in_flight_leaves_tokens_of_two_versions(
    engine: VLLMEngine, policy: Policy, model: Path, explicit_pause: bool
) -> None:
    task = asyncio.create_task(engine.generate(request("flight", max_new_tokens=160)))
    await until_running(engine, num_tokens=5)
    policy.change(seed=2)
    if explicit_pause:
        await engine.pause("keep")
    await engine.update_weights(policy.offer(1))
    if explicit_pause:
        await engine.resume()
    generation = await task
    versions = generation.policy_versions
    switch = int((versions == 0).sum())
    assert 0 < switch < 160 and versions.tolist() == [0] * switch + [1] * (160 - switch)
    tokens = whole(PROMPT, generation)
    old, new = Policy(model).logprobs(tokens)[len(PROMPT) :], policy.logprobs(tokens)[len(PROMPT) :]
    np.testing.assert_allclose(generation.logprobs[:switch], old[:switch], atol=1e-4)
    np.testing.assert_allclose(generation.logprobs[switch:], new[switch:], atol=1e-4)


def without(update: WeightUpdate, name: str) -> WeightUpdate:
    return replace(update, manifest=tuple(spec for spec in update.manifest if spec.name != name))


def with_shape(update: WeightUpdate, name: str, shape: tuple[int, ...]) -> WeightUpdate:
    manifest = [replace(spec, shape=shape) if spec.name == name else spec for spec in update.manifest]
    return replace(update, manifest=tuple(manifest))


NAME = "model.layers.1.self_attn.k_proj.weight"


async def test_vllm_engine_a_wrong_manifest_is_refused_by_name_and_nothing_changes(
    engine: VLLMEngine, policy: Policy
) -> None:
    before = await engine.generate(request("intact"))
    offer = policy.offer(5)
    unknown = TensorSpec(name="model.layers.9.extra.weight", shape=(1,), dtype="float32")
    wrong = {
        f"'{NAME}' is missing": without(offer, NAME),
        f"'{NAME}' must have shape": with_shape(offer, NAME, (128, 64)),
        "'model.layers.9.extra.weight' does not exist": replace(offer, manifest=(*offer.manifest, unknown)),
    }
    for message, update in wrong.items():
        with pytest.raises(WeightSyncError, match=message):
            await engine.update_weights(update)
    after = await engine.generate(request("intact-still"))
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.policy_versions.tolist() == [0] * 12


async def test_vllm_engine_an_update_that_breaks_off_stops_decoding_until_the_next_one(
    engine: VLLMEngine, policy: Policy
) -> None:
    policy.change(seed=4)
    offer = policy.offer(6)
    half = replace(offer, handle=replace(offer.handle, num_bytes=offer.handle.num_bytes // 2))
    with pytest.raises(WeightSyncError):
        await engine.update_weights(half)
    task = asyncio.create_task(engine.generate(request("repaired")))
    with pytest.raises(WeightSyncError, match="mixture of old and new weights"):
        await engine.resume()
    done, _ = await asyncio.wait({task}, timeout=0.3)
    assert not done, "no token may be made from half of an update"
    await engine.update_weights(offer)
    generation = await task
    assert generation.policy_versions.tolist() == [6] * 12
    expected = policy.logprobs(whole(PROMPT, generation))[len(PROMPT) :]
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


async def test_vllm_engine_weights_of_this_process_cannot_reach_the_engine(engine: VLLMEngine, policy: Policy) -> None:
    with pytest.raises(WeightSyncError, match="shared_memory"):
        await engine.update_weights(replace(policy.offer(1), transport="in_process"))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("long", max_new_tokens=MAX_CONTEXT), "20 prompt tokens plus max_new_tokens 192 exceed"),
        (request("none", max_new_tokens=0), "must be at least 1"),
        (request("foreign", prompt=np.array([5, 999], np.int32)), "token id 999"),
        (request("empty", prompt=np.array([], np.int32)), "no tokens"),
    ],
)
async def test_vllm_engine_requests_that_cannot_be_served_are_the_users_error(
    engine: VLLMEngine, bad: GenerationRequest, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        await engine.generate(bad)


async def test_vllm_engine_a_request_may_fill_the_context_exactly(engine: VLLMEngine) -> None:
    generation = await engine.generate(request("exact", max_new_tokens=MAX_CONTEXT - len(PROMPT)))
    assert len(generation.token_ids) == MAX_CONTEXT - len(PROMPT)


async def test_vllm_engine_sleep_is_unsupported_on_a_cpu(engine: VLLMEngine) -> None:
    for call in (engine.sleep, engine.wake):
        with pytest.raises(UnsupportedError, match="CPU"):
            await call()


async def test_vllm_engine_an_idle_engine_uses_no_cpu(engine: VLLMEngine) -> None:
    await engine.generate(request("last"))
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]

    def busy_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes if process.is_running())

    await asyncio.sleep(1.0)  # vLLM's housekeeping after a request
    shares = []
    # A spinning engine uses a whole core. The limit leaves room for machines on which wake-ups cost more than usual: on
    # an idle core, `make bench NAME=parts` measures 1.6 to 6 %.
    for _ in range(3):
        before, began = busy_s(), time.monotonic()
        await asyncio.sleep(2.0)
        shares.append((busy_s() - before) / (time.monotonic() - began))
    assert min(shares) <= 0.2, shares


async def test_vllm_engine_messages_go_to_the_log_file(engine: VLLMEngine, log: Path) -> None:
    text = log.read_text()
    assert "Loading weights took" in text
    assert text.count("EngineCore") > 1


async def test_vllm_engine_a_killed_engine_fails_its_requests_and_calls(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden=128, tied=True)
    engine = VLLMEngine(make_spec(model, tmp_path / "log"))
    await engine.start()
    policy = Policy(model)
    policy.change(seed=3)  # tied embeddings: the output layer must follow the input layer
    receipt = await engine.update_weights(policy.offer(1))
    assert "lm_head.weight" not in receipt.checksums
    (scores,) = await engine.logprobs([PROMPT])
    np.testing.assert_allclose(scores, policy.logprobs(PROMPT), atol=1e-4)

    waiting = [asyncio.create_task(engine.generate(request(str(i), max_new_tokens=160))) for i in range(3)]
    await until_running(engine)
    (core,) = engine.processes
    core.send_signal(signal.SIGSTOP)
    call = asyncio.create_task(engine.pause("keep"))  # vLLM would never answer this
    await asyncio.sleep(0.1)
    core.kill()
    for task in [*waiting, call]:
        with pytest.raises(EngineDiedError, match="inference engine 'engine-0' died"):
            await asyncio.wait_for(task, 30)
    with pytest.raises(EngineDiedError):
        await engine.generate(request("later"))
    await engine.close()
    await engine.close()
    assert not core.is_running()


async def test_vllm_engine_requests_of_a_closed_engine_fail_and_no_process_stays(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden=128)
    engine = VLLMEngine(make_spec(model, tmp_path / "log"))
    await engine.start()
    processes = engine.processes
    assert processes
    task = asyncio.create_task(engine.generate(request("running", max_new_tokens=160)))
    await until_running(engine)
    await engine.close()
    with pytest.raises(EngineDiedError, match="closed"):
        await asyncio.wait_for(task, 10)
    assert not any(process.is_running() for process in processes)


async def test_vllm_engine_settings_that_vllm_refuses_are_the_users_error(model: Path, tmp_path: Path) -> None:
    engine = build_engine(make_spec(model, tmp_path / "log", kv_cache_bytes=2**12))
    with pytest.raises(ModelError, match=r"raise inference.kv_cache_bytes \(4096\).*\(see .*log\)"):
        await engine.start()
    await engine.close()


SCRIPT = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from roll.inference import EngineSpec, build_engine

    async def main():
        engine = build_engine(EngineSpec(engine_id="e", kind="vllm", model_path=sys.argv[1], dtype="float32",
            max_context=64, kv_cache_bytes=8 * 2**20, num_threads=1, log_path=Path(sys.argv[2])))
        await engine.start()
        print(*(process.pid for process in engine.processes), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())  # without `if __name__ == "__main__"`: the engine's process must not run this script again
"""


async def test_vllm_engine_the_engines_process_ends_when_its_owner_is_killed_and_nothing_is_printed(
    model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    owner = subprocess.run(
        [sys.executable, str(script), str(model), str(tmp_path / "log")],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"PYTHONPATH": "src"},
    )  # fmt: skip
    assert owner.returncode == -signal.SIGKILL, owner.stderr
    assert owner.stderr == ""
    (line,) = owner.stdout.splitlines()
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(int(pid)) for pid in line.split()):
        assert time.monotonic() < deadline, "the engine's process outlived its owner"
        await asyncio.sleep(0.05)


async def test_vllm_engine_an_engine_begins_in_a_process_that_has_waited_and_another_is_spawned(
    model: Path, tmp_path: Path
) -> None:
    spec = make_spec(model, tmp_path / "engine.log")
    with prestart_engine("vllm", spec.num_threads):
        (waiting,) = prefork._unclaimed_processes
        engine = build_engine(spec)
        await engine.start()
        assert isinstance(engine, VLLMEngine)
        assert waiting.process.pid in {process.pid for process in engine.processes}
        answer = await engine.generate(request("first"))
        await engine.close()
        assert waiting.process.poll() is not None
        again = build_engine(spec)
        await again.start()
        assert isinstance(again, VLLMEngine)
        assert waiting.process.pid not in {process.pid for process in again.processes}
        assert (await again.generate(request("first"))).token_ids.tolist() == answer.token_ids.tolist()
        await again.close()
