"""The endpoint of agents under load: requests a second, and the latency that it adds to an engine's.

    agents, in a process of their own ──HTTP──► endpoint ─► simulated engine: a known time for every request

Each agent is a conversation that grows by a turn with every request and starts anew after some; so most contexts extend
an earlier answer's tokens, as those of real agents do. What a request took at its agent, less the engine's time for it,
is what the endpoint added, the agent's own waiting for a core included. `endpoint_cpu_ms_per_request` is the server's
CPU time, with the simulated engine's, and `agents_cpu_ms_per_request` that of the agents' process. The agents
come one after the other within `--arrive-s`, and what they ask is counted from when all are there: with 0 they all
knock in the same moment, and the last of them waits for the 199 before it.

    make bench NAME=agentic
    python benchmarks/bench_agents_endpoint.py --agents 200 --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _report import report

from roll.agents import Session
from roll.agents.server import AgentServer
from roll.config.agents import AgentLimitsConfig
from roll.data import ChatRenderer
from roll.models import find_stop_token_ids, load_tokenizer, resolve_model
from roll.types import Generation, GenerationRequest, SamplingParams

NUM_TOKENS = 32
TURNS = 8
GOAL_REQUESTS_PER_S, GOAL_ADDED_MS_P99 = 1000, 10
"""With 200 agents."""
AGENT = Path(__file__).with_name("_endpoint_agents.py")


def engine_time(name: str, mean_s: float) -> float:
    """Of a request, known on both sides: from half the mean to one and a half of it."""
    draw = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") / 2**32
    return mean_s * (0.5 + draw)


def simulated(renderer: ChatRenderer, end: int, mean_s: float) -> Callable[[GenerationRequest], object]:
    """An engine that says some text after the time that the request's name stands for."""
    text = renderer.tokenize(
        "The quick brown fox jumps over the lazy dog, again and again, until the day is done. " * 4
    )
    ids = np.concatenate([text[: NUM_TOKENS - 1], [end]]).astype(np.int32)
    logprobs, versions = np.full(len(ids), -1.0, np.float32), np.zeros(len(ids), np.int32)

    async def generate(request: GenerationRequest) -> Generation:
        await asyncio.sleep(engine_time(request.request_id, mean_s))
        return Generation(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=logprobs,
            policy_versions=versions,
            finish_reason="stop",
        )

    return generate


async def measure(options: argparse.Namespace) -> dict[str, float]:
    """One run of the agents."""
    path = resolve_model(options.model)
    renderer, ends = ChatRenderer(load_tokenizer(path)), find_stop_token_ids(path)
    generate = simulated(renderer, ends[0], options.engine_s)
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, stop_token_ids=ends)
    limits = AgentLimitsConfig(turns=10**6, tokens=10**9, time_s=3600.0)
    gc.freeze()  # as a run does before its first step
    async with AgentServer() as server:
        keys = []
        for number in range(options.agents):
            name = f"bench-{number}"
            first = GenerationRequest(request_id=name, token_ids=np.zeros(1, np.int32), sampling=sampling)
            session = Session(name, first, generate, renderer, limits=limits, max_context=8192)  # type: ignore[arg-type]
            server.sessions.add(session)
            keys.append(session.key)
        work = {
            "url": server.base_url,
            "keys": keys,
            "seconds": options.seconds,
            "arrive_s": options.arrive_s,
            "turns": TURNS,
            "mean_s": options.engine_s,
            "stream": options.stream,
        }
        agents = await asyncio.create_subprocess_exec(
            sys.executable, str(AGENT), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        before = resource.getrusage(resource.RUSAGE_SELF)
        output, _ = await agents.communicate(json.dumps(work).encode())
        after = resource.getrusage(resource.RUSAGE_SELF)
    said = json.loads(output)
    added = np.asarray(said["added_s"]) * 1000
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "requests_per_s": len(added) / said["took_s"],
        "added_ms_p50": float(np.percentile(added, 50)),
        "added_ms_p90": float(np.percentile(added, 90)),
        "added_ms_p99": float(np.percentile(added, 99)),
        "endpoint_cpu_ms_per_request": used * 1000 / said["requests"],
        "agents_cpu_ms_per_request": said["cpu_s"] * 1000 / said["requests"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--engine-s", type=float, default=0.19, help="mean time of the engine for a request")
    parser.add_argument("--arrive-s", type=float, default=1.0, help="over which the agents come; 0: all at once")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer and template are used")
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("agents", "engine_s", "arrive_s", "stream")}
    found = {name: round(value, 3) for name, value in asyncio.run(measure(options)).items()}
    report("agents_endpoint", settings | found)
    if found["requests_per_s"] < GOAL_REQUESTS_PER_S or found["added_ms_p99"] > GOAL_ADDED_MS_P99:
        raise SystemExit(f"missed: {GOAL_REQUESTS_PER_S} requests a second, {GOAL_ADDED_MS_P99} ms added at P99")


if __name__ == "__main__":
    main()
