"""A client of the training API that speaks its wire format, without the client library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from roll.serving import ServeSettings
from roll.serving.server import TrainingServer
from roll.serving.startup import open_server
from roll.serving.wire import CLASSES, CONTENT_TYPE

KEY, OTHER_KEY = "tml-alice-0001", "tml-bob-00001"
ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


@asynccontextmanager
async def serving(model: Path, directory: Path, **changes: Any) -> AsyncIterator[TrainingServer]:
    """A server of `model` under the name `tiny`, in float32."""
    settings = {
        "model": str(model),
        "name": "tiny",
        "directory": directory,
        "port": 0,
        "keys": {KEY: "alice", OTHER_KEY: "bob"},
        "dtype": "float32",
        "max_rank": 8,
        "max_context": 96,
        "max_adapters": 2,
        "num_threads": 1,
        "poll_s": 5.0,
        **changes,
    }
    async with open_server(ServeSettings(**settings)) as server:
        yield server


def tensor(values: Any, shape: Sequence[int] | None = None) -> Any:
    """A dense tensor: int64 for integers, else float32."""
    array = np.asarray(values)
    integers = array.dtype.kind in "iu"
    content = array.astype("<i8" if integers else "<f4")
    return CLASSES["Tensor"](dense=content.tobytes(), dtype=2 if integers else 1, shape=shape or array.shape)


def datum(tokens: Sequence[int], targets: Sequence[int], **inputs: Any) -> Any:
    message = CLASSES["Datum"]()
    half = len(tokens) // 2
    for part in (tokens[:half], tokens[half:]):  # two chunks are one sequence
        message.model_input.add().encoded_text.tokens = np.asarray(part, "<i4").tobytes()
    for name, values in {"target_tokens": np.asarray(targets, np.int64), **inputs}.items():
        message.loss_fn_inputs[name].CopyFrom(values if hasattr(values, "dense") else tensor(values))
    return message


class ApiFailure(Exception):
    """An answer that is not a result: an HTTP status, or 200 and the error of a promise."""

    def __init__(self, status: int, content: Mapping[str, Any]) -> None:
        super().__init__(f"{status}: {content}")
        self.status, self.content = status, content


class Client:
    """Requests with one key."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str = KEY) -> None:
        self.http, self.url, self.key = http, url, key
        self.session_id = ""
        self.seq: dict[str, int] = {}

    async def send(self, path: str, body: Any = None, *, content_type: str = "application/json") -> Any:
        data = {"data": body, "headers": {"Content-Type": content_type}} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(f"{self.url}/api/v1/{path}", **_with_key(data, self.key)) as response:
            if response.content_type == CONTENT_TYPE:
                return await response.read()
            content = await response.json()
            if response.status != 200 or "error" in content:
                raise ApiFailure(response.status, content)
            return content

    async def get(self, path: str) -> Any:
        async with self.http.get(f"{self.url}/api/v1/{path}", headers={"X-API-Key": self.key}) as response:
            content = await response.json()
            if response.status != 200:
                raise ApiFailure(response.status, content)
            return content

    async def result(self, promise: Mapping[str, Any]) -> Any:
        while True:
            found = await self.send("retrieve_future", {"request_id": promise["request_id"]})
            if isinstance(found, bytes) or found.get("type") != "try_again":
                return found

    async def open(self) -> Client:
        answer = await self.send("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"})
        self.session_id = answer["session_id"]
        return self

    async def create_model(self, number: int = 0, **lora: Any) -> str:
        body = {
            "session_id": self.session_id,
            "model_seq_id": number,
            "base_model": "tiny",
            "lora_config": {"rank": 4, "seed": 3, **lora},
        }
        return (await self.result(await self.send("create_model", body)))["model_id"]

    def next_seq(self, model: str) -> int:
        self.seq[model] = self.seq.get(model, 0) + 1
        return self.seq[model]

    async def submit(
        self,
        model: str,
        data: Sequence[Any],
        loss: str = "cross_entropy",
        *,
        seq: int | None = None,
        forward_only: bool = False,
        config: Mapping[str, float] | None = None,
    ) -> Any:
        message = CLASSES["ForwardBackwardRequest"](
            model_id=model,
            seq_id=self.next_seq(model) if seq is None else seq,
            data=data,
            loss_fn=loss,
            forward_only=forward_only,
            loss_fn_config=config or {},
        )
        return await self.send("forward_backward", message.SerializeToString(), content_type=CONTENT_TYPE)

    async def forward_backward(self, model: str, data: Sequence[Any], loss: str = "cross_entropy", **more: Any) -> Any:
        """(loss, log-probs of each datum)."""
        return decode_outputs(await self.result(await self.submit(model, data, loss, **more)))

    async def step(self, model: str, seq: int | None = None, **params: float) -> Any:
        body = {"model_id": model, "seq_id": seq or self.next_seq(model), "adam_params": {**ADAM, **params}}
        return (await self.result(await self.send("optim_step", body)))["metrics"]

    async def save(self, model: str, name: str, **more: Any) -> str:
        body = {"model_id": model, "seq_id": self.next_seq(model), "path": name, **more}
        return (await self.result(await self.send("save_weights", body)))["path"]

    async def snapshot(self, model: str, number: int) -> str:
        body = {"model_id": model, "seq_id": self.next_seq(model), "sampling_session_seq_id": number}
        return (await self.result(await self.send("save_weights_for_sampler", body)))["sampling_session_id"]

    async def sample(self, session: str, seq: int, tokens: Sequence[int], count: int = 1, **more: Any) -> Any:
        """A decoded `SampleResponse`."""
        settings = {"max_tokens": 8, "seed": 1, **more.pop("params", {})}
        body = {
            "sampling_session_id": session,
            "seq_id": seq,
            "num_samples": count,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [int(token) for token in tokens]}]},
            "sampling_params": settings,
            **more,
        }
        promise = await self.send("asample", body)
        assert len(promise["sample_sequence_ids"]) == count
        message = CLASSES["SampleResponse"]()
        message.ParseFromString(await self.result(promise))
        return message


def _with_key(data: dict[str, Any], key: str) -> dict[str, Any]:
    return {**data, "headers": {**data.get("headers", {}), "X-API-Key": key}}


def decode_outputs(body: bytes) -> tuple[float, list[np.ndarray]]:
    message = CLASSES["ForwardBackwardOutput"]()
    message.ParseFromString(body)
    (record,) = message.loss_fn_outputs
    column = record.fields["logprobs"]
    offsets = np.frombuffer(column.offsets, "<i8")
    assert record.num_datums == len(offsets) - 1 and column.dtype == 1
    parts = [np.frombuffer(column.data[start:end], "<f4") for start, end in pairwise(offsets)]
    return message.metrics["loss:sum"], parts


def read_sequences(message: Any) -> list[tuple[list[int], np.ndarray, int]]:
    return [
        (np.frombuffer(each.tokens, "<i4").tolist(), np.frombuffer(each.logprobs, "<f4"), each.stop_reason)
        for each in message.sequences
    ]


@asynccontextmanager
async def client(server: TrainingServer, key: str = KEY) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        yield await Client(http, server.url, key).open()


async def gather(*work: Any) -> list[Any]:
    return list(await asyncio.gather(*work))
