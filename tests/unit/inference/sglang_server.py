"""The HTTP interface of an SGLang server, with the engine `hf` behind it.

Paths, fields and replies are those of SGLang 0.5.23 (`entrypoints/http_server.py`, `managers/io_struct.py`). The real
server is tested in `tests/extras/test_sglang.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from hf_helpers import Weights, engine_spec, send
from safetensors.torch import load_file

from roll.errors import DataError
from roll.inference.hf import HFEngine
from roll.types import GenerationRequest, SamplingParams


class SGLangServer:
    """One server; `calls` has the paths and bodies of all calls."""

    def __init__(self, model: Path, **changes: Any) -> None:
        self.model = model
        self.engine = HFEngine(engine_spec(model, **changes))
        self.lora_info: dict[str, Any] = {}
        self.adapters: list[str] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.connections: set[Any] = set()
        self.early_aborts = 0
        self.failures: dict[str, web.Response] = {}
        """Replies to send instead, by path."""
        self.first_version = "default"
        self.eos_token_ids: tuple[int, ...] = ()
        self.without_tokens: set[str] = set()
        """IDs of requests whose tokens are lost."""
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a call."""
        body = await request.json() if request.method == "POST" else {}
        self.calls.append((request.path, body))
        self.connections.add(request.protocol)
        if request.path in self.failures:
            reply = self.failures[request.path]
            return web.Response(status=reply.status, body=reply.body, content_type=reply.content_type)
        return await getattr(self, request.path.strip("/").replace("/", "_"))(body)

    async def health_generate(self, body: dict[str, Any]) -> web.Response:
        return web.Response(status=503 if self.engine._paused else 200)

    async def server_info(self, body: dict[str, Any]) -> web.Response:
        info = {"model_path": str(self.model), "skip_tokenizer_init": True}
        info |= {"max_total_num_tokens": 4096, "max_req_input_len": 97}
        return web.json_response(info | self.lora_info)

    async def generate(self, body: dict[str, Any]) -> web.Response:
        params, tokens = body["sampling_params"], np.asarray(body["input_ids"], np.int32)
        adapter = body.get("lora_path")
        scored = body["logprob_start_len"] == 0
        if scored:
            found = (await self.engine.logprobs([tokens], adapter=adapter))[0].tolist()
            pairs = [[None if i == 0 else x, int(t), None] for i, (x, t) in enumerate(zip(found, tokens, strict=True))]
            meta = {"finish_reason": {"type": "length"}, "weight_version": "0", "input_token_logprobs": pairs}
            return web.json_response({"output_ids": [0], "meta_info": meta})
        sampling = SamplingParams(
            max_new_tokens=params["max_new_tokens"],
            temperature=params["temperature"],
            # As in SGLang, `ignore_eos` also ignores the stop tokens.
            stop_token_ids=() if params["ignore_eos"] else (*(params["stop_token_ids"] or ()), *self.eos_token_ids),
            seed=params.get("sampling_seed"),
        )
        try:
            made = await self.engine.generate(
                GenerationRequest(request_id=body["rid"], token_ids=tokens, sampling=sampling, adapter=adapter)
            )
        except DataError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        if body["rid"] in self.without_tokens:
            aborted = {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "0"}
            return web.json_response({"output_ids": [], "meta_info": aborted})
        names = [self.first_version if version == 0 else str(version) for version in made.policy_versions.tolist()]
        starts = [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
        spans = [
            {"version": names[start], "start": start, "end": end}
            for start, end in zip(starts, [*starts[1:], len(names)], strict=True)
        ]
        meta = {
            "finish_reason": {"type": made.finish_reason},
            "weight_version": names[-1] if names else self.first_version,
            "output_token_logprobs": [
                [float(x), int(t), None] for x, t in zip(made.logprobs, made.token_ids, strict=True)
            ],
        }
        meta |= {"weight_versions": spans} if len(spans) > 1 else {}
        return web.json_response({"output_ids": made.token_ids.tolist(), "meta_info": meta})

    async def abort_request(self, body: dict[str, Any]) -> web.Response:
        # As SGLang does: every request whose id begins with this one, if a request has exactly this id.
        if self.early_aborts:  # the abort arrived before its request
            self.early_aborts -= 1
            return web.Response()
        names = list(self.engine._futures)
        if body.get("abort_all"):
            await self.engine.abort(names)
        elif body["rid"] in names:
            if self.engine._paused:  # SGLang does not send the tokens of a request that was running before the pause
                self.without_tokens |= {name for name in names if name.startswith(body["rid"])}
            await self.engine.abort([name for name in names if name.startswith(body["rid"])])
        return web.Response()

    async def pause_generation(self, body: dict[str, Any]) -> web.Response:
        await self.engine.pause({"retract": "keep", "abort": "abort"}[body["mode"]])
        return web.json_response({"message": "paused", "status": "ok"})

    async def continue_generation(self, body: dict[str, Any]) -> web.Response:
        await self.engine.resume()
        return web.json_response({"message": "continued", "status": "ok"})

    async def update_weights_from_disk(self, body: dict[str, Any]) -> web.Response:
        tensors = {}
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            tensors |= load_file(file)
        await send(self.engine, Weights(tensors), int(body["weight_version"]))
        return web.json_response({"success": True, "message": "ok", "num_paused_requests": 0})

    async def load_lora_adapter(self, body: dict[str, Any]) -> web.Response:
        directory, name = Path(body["lora_path"]), body["lora_name"]
        if name in self.adapters:
            return web.json_response({"success": False, "error_message": f"{name} already exists"}, status=400)
        found = load_file(directory / "adapter_model.safetensors")
        tensors = {key.removeprefix("base_model.model."): tensor for key, tensor in found.items()}
        # SGLang computes these in one layer. It rejects an adapter that lacks a part, or ends when it is used.
        for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            parts = {key.split(".")[-3] for key in tensors} & {*fused}
            assert not parts or parts == {*fused}, f"only {parts} of {fused}"
        modules = self.engine._spec.lora.target_modules  # type: ignore[union-attr]
        unadapted = [key for key in tensors if key.split(".")[-3] not in modules]
        assert not any(tensors.pop(key).any() for key in unadapted)
        await send(self.engine, Weights(tensors), 1, adapter=name)
        self.adapters.append(name)
        return web.json_response({"success": True, "error_message": ""})

    async def unload_lora_adapter(self, body: dict[str, Any]) -> web.Response:
        # SGLang waits until no request uses the adapter.
        if body["lora_name"] not in self.adapters:
            text = f"LoRA with name {body['lora_name']} does not exist. Loaded LoRAs: {self.adapters}"
            return web.json_response({"success": False, "error_message": text}, status=400)
        self.adapters.remove(body["lora_name"])
        adapters = self.engine._decoder.adapters  # type: ignore[union-attr]
        del adapters._adapters[body["lora_name"]], adapters.versions[body["lora_name"]]  # type: ignore[union-attr]
        return web.json_response({"success": True, "error_message": ""})

    async def v1_models(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in (str(self.model), *self.adapters)]})

    async def release_memory_occupation(self, body: dict[str, Any]) -> web.Response:
        return web.Response()

    resume_memory_occupation = release_memory_occupation


@asynccontextmanager
async def serving(model: Path, **changes: Any) -> AsyncIterator[SGLangServer]:
    """Serve a model on a free port. `changes` are fields of the spec of the engine behind the interface."""
    server = SGLangServer(model, **changes)
    await server.engine.start()
    application = web.Application(client_max_size=2**30)
    application.router.add_route("*", "/{path:.+}", server.handle)
    runner = web.AppRunner(application, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await server.engine.close()
        await runner.cleanup()
