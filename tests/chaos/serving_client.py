"""A client of `roll serve` that may be killed at any moment, and continues with its model when it is started again.

python serving_client.py URL STREAM LOG NUM_REQUESTS

Each request of the model is a function of its number and of STREAM. The log has the ID of the session, and the outcome
of each request as soon as the client knows it. Requests whose outcome is unknown are sent again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from roll.serving.wire import CLASSES, CONTENT_TYPE

KEY = "tml-a-key-for-chaos"
AHEAD = 3
"""The number of requests that are sent before the outcome of the first is known."""
TOKENS = np.arange(10, 26)


class Client:
    """The requests of one model."""

    def __init__(self, http: aiohttp.ClientSession, url: str, stream: int, log: Path) -> None:
        self.http, self.url, self.stream, self.log = http, url, stream, log
        self.known = dict(json.loads(line) for line in log.read_text().splitlines()) if log.exists() else {}

    def write(self, name: str, value: Any) -> None:
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, (json.dumps([name, value]) + "\n").encode())  # a line is written as a whole
        os.close(descriptor)
        self.known[name] = value

    async def send(self, path: str, body: Any) -> Any:
        """Send a request until there is an answer, as the client library does."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"X-API-Key": KEY, "Content-Type": CONTENT_TYPE if isinstance(body, bytes) else "application/json"}
        while True:
            try:
                async with self.http.post(f"{self.url}/api/v1/{path}", data=data, headers=headers) as response:
                    content = await response.read()
                    if response.status >= 500:
                        raise aiohttp.ClientError
                    if response.status != 200:
                        raise SystemExit(f"{path}: {response.status} {content!r}")
                    return content if response.content_type == CONTENT_TYPE else json.loads(content)
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(0.1)

    async def result(self, promise: Any) -> Any:
        while True:
            found = await self.send("retrieve_future", {"request_id": promise["request_id"]})
            if isinstance(found, bytes) or found.get("type") != "try_again":
                return found

    async def open(self) -> str:
        if "session" not in self.known:
            self.write("session", (await self.send("create_session", {}))["session_id"])
        body = {"session_id": self.known["session"], "model_seq_id": 0, "base_model": "tiny"}
        body |= {"lora_config": {"rank": 4, "seed": self.stream}}
        return (await self.result(await self.send("create_model", body)))["model_id"]

    def build(self, model: str, number: int) -> tuple[str, Any]:
        """The path and body of a request: two passes, an update; from time to time a checkpoint and a snapshot."""
        common = {"model_id": model, "seq_id": number}
        match number % 10:
            case 3 | 6 | 8:
                return "optim_step", {**common, "adam_params": {"learning_rate": 0.01}}
            case 9:
                return "save_weights", {**common, "path": f"step-{number}"}
            case 0:
                return "save_weights_for_sampler", {**common, "sampling_session_seq_id": number}
        random = np.random.default_rng([self.stream, number])
        message = CLASSES["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn="cross_entropy")
        each = message.data.add()
        each.model_input.add().encoded_text.tokens = TOKENS.astype("<i4").tobytes()
        targets, weights = random.integers(4, 260, len(TOKENS)).astype("<i8"), np.ones(len(TOKENS), "<f4")
        for name, values, dtype in (("target_tokens", targets, 2), ("weights", weights, 1)):
            each.loss_fn_inputs[name].CopyFrom(CLASSES["Tensor"](dense=values.tobytes(), dtype=dtype))
        return "forward_backward", message.SerializeToString(deterministic=True)

    def describe(self, outcome: Any) -> Any:
        """Return the bytes of a training result, without IDs, which differ between models."""
        if isinstance(outcome, bytes):
            message = CLASSES["ForwardBackwardOutput"]()
            message.ParseFromString(outcome)
            content = message.loss_fn_outputs[0].fields["logprobs"].data
            return [message.metrics["loss:sum"], hashlib.sha256(content).hexdigest()]
        return outcome.get("metrics") or outcome["type"]

    async def sample(self, session: str) -> None:
        body = {
            "sampling_session_id": session,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS.tolist()}]},
            "sampling_params": {"max_tokens": 4},
        }
        promise = await self.send("asample", body)
        first = await self.result(promise)
        assert await self.send("asample", body) == promise and await self.result(promise) == first

    async def run(self, count: int) -> None:
        model = await self.open()
        promises: dict[int, Any] = {}
        first = 1 + sum(name.isdigit() for name in self.known)
        for number in range(first, count + 1):
            for ahead in range(number, min(number + AHEAD, count + 1)):
                if ahead not in promises:
                    promises[ahead] = await self.send(*self.build(model, ahead))
            outcome = await self.result(promises.pop(number))
            if isinstance(outcome, dict) and "error" in outcome:
                raise SystemExit(f"request {number}: {outcome}")
            if isinstance(outcome, dict) and outcome.get("sampling_session_id"):
                await self.sample(outcome["sampling_session_id"])
            self.write(str(number), self.describe(outcome))


async def main() -> None:
    url, stream, log, count = sys.argv[1:]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        await Client(http, url, int(stream), Path(log)).run(int(count))


if __name__ == "__main__":
    asyncio.run(main())
