"""A CUDA device without memory or numbers, for a process that has loaded `fake_cuda_device.cpp` before PyTorch.

PyTorch's fake tensors know devices: an operation on tensors of two devices fails as it would on real ones. So training
steps run as if there were a device, and whatever branches on it is run. Numbers that code reads from the device are
made up here, and counted: on a real device, each read waits for everything that was launched before.

    python fake_cuda.py LIBRARY CASES        run the cases of a JSON file, print one JSON object for each
    python fake_cuda.py LIBRARY diffusion    run the losses of diffusion models
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

SOURCE = Path(__file__).with_name("fake_cuda_device.cpp")


def build_library(directory: Path) -> Path:
    """Compile the device's library. This takes about two seconds."""
    import torch
    from torch.utils import cpp_extension

    library, torch_libraries = directory / "fake_cuda_device.so", Path(torch.__file__).parent / "lib"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    links = [f"-L{torch_libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_libraries}"]
    command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", *includes, str(SOURCE), "-o", str(library), *links]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    return library


def run_cases(library: Path, cases: list[dict[str, Any]], directory: Path) -> list[dict[str, Any]]:
    """Run `run_case` for each case in a new process; return the results in order."""
    file = directory / "cases.json"
    file.write_text(json.dumps(cases))
    return run_program(library, str(file), timeout_s=240 + 60 * len(cases))


def run_program(library: Path, argument: str, *, timeout_s: int = 240) -> list[dict[str, Any]]:
    """Run this file in a new process, and return the JSON objects that it prints."""
    command = [sys.executable, __file__, str(library), argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@contextlib.contextmanager
def fake_cuda() -> Iterator[Counter[str]]:
    """Inside, `cuda` is a device with fake tensors. Yield the numbers of `reads`, `copies` and `pageable copies`."""
    import numpy as np
    import torch
    from torch import Tensor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode

    from roll.models.multimodal import MediaInputs
    from roll.training import dry_run

    counts: Counter[str] = Counter()
    state, skeleton = torch.zeros(16, dtype=torch.uint8), dry_run._build_meta_network
    apply, empty_like, pinned = torch.nn.Module._apply, torch.empty_like, set[int]()

    class Copies(TorchDispatchMode):
        """Counts copies to the device, and fails for reads from it that do not go through `roll.models.transfers`."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func._schema.name
            if name in ("aten::_to_copy", "aten::copy_"):
                source, target = (args[1], args[0]) if name == "aten::copy_" else (args[0], result)
                kinds = source.device.type, target.device.type
                if kinds == ("cpu", "cuda"):
                    counts["copies"] += 1
                    counts["pageable copies"] += id(source) not in pinned
                elif kinds == ("cuda", "cpu") and id(target) in pinned:
                    counts["copies to pinned memory"] += 1
                elif kinds == ("cuda", "cpu"):
                    counts["reads elsewhere"] += 1
            return result

    def mark_pinned(buffer: Tensor) -> Tensor:
        pinned.add(id(buffer))
        kept.append(buffer)  # so that no other tensor gets its id
        return buffer

    def build_empty(like: Tensor, *, pin_memory: bool = False, **settings: Any) -> Tensor:
        tensor = empty_like(like, **settings)
        return mark_pinned(tensor) if pin_memory else tensor

    kept: list[Tensor] = []

    def get_media(inputs: MediaInputs, digest: str) -> Any:
        """Processors compute with numbers, so they run without fake tensors, as their results are CPU tensors."""
        with unset_fake_temporarily():
            return read_media(inputs, digest)

    read_media = MediaInputs.get

    def read(tensor: Tensor) -> Any:
        counts["reads"] += 1
        return np.ones(tensor.shape, np.float32)

    def sum_of_ranks(self: Any, sharded: Tensor, whole: Tensor) -> float:
        counts["reads"] += 1
        return 1.0

    def move(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        """As for real tensors, parameters stay the same objects, and buffers do not."""
        for child in module.children() if recurse else ():
            move(child, fn)
        if not any(isinstance(own, FakeTensor) for own in (*module._parameters.values(), *module._buffers.values())):
            return apply(module, fn, recurse=False)
        for parameter in (own for own in module._parameters.values() if own is not None):
            with torch.no_grad():
                new = fn(parameter)
            if new.device != parameter.device:
                parameter.data, parameter.fake_device = new, new.device  # type: ignore[attr-defined]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fn(buffer)
        return module

    def wait(device: Any) -> None:
        counts["waits"] += 1

    stream = mock.MagicMock()  # for offloaded states; test_streams.py checks the order of their copies
    instead: dict[str, Any] = {
        "torch.Stream": type("Stream", (), {"__new__": lambda cls, device: stream}),  # a type, for annotations
        "torch.accelerator.current_stream": lambda device: stream,
        "torch.Tensor.record_stream": lambda tensor, stream: None,
        "torch.empty_like": build_empty,
        "torch.nn.Module._apply": move,
        "torch.accelerator.device_count": lambda: 1,
        "torch.accelerator.set_device_index": lambda index: None,
        "torch.accelerator.synchronize": wait,
        "torch.cuda.get_rng_state": lambda device: state,
        "torch.cuda.set_rng_state": lambda state, device: None,
        "torch.cuda.get_device_capability": lambda device: (9, 0),
        "torch.bincount": lambda x, minlength: x.new_empty(minlength),
        "roll.training.backend.build_network": lambda *given: skeleton(*given, dry_run._MetaWeights()).to_empty(
            device=torch.device("cuda", 0)
        ),
        "roll.training.distributed.Ranks.sum": sum_of_ranks,
        "roll.models.transfers._allocate_pinned": lambda size: mark_pinned(torch.empty(size, dtype=torch.uint8)),
        "roll.models.transfers._read": read,
        "roll.models.multimodal.MediaInputs.get": get_media,
        "roll.training.memory.activation_offload.MIN_OFFLOAD_BYTES": 0,
        "roll.training.passes.collect_topk": lambda *args: None,
        "roll.training.passes.fill_missing_outputs": lambda *args, **more: None,
        "roll.training.optimizer.Optimizer.get_steps": lambda own: dict.fromkeys(own._locals, 0),
        "roll.training.network.routing.Routing._record_routing": lambda *args: None,
        "roll.training.network.routing.Routing.gather_load": lambda *args: None,
        "roll.training.network.routing.Routing.compute_metrics": lambda *args: {},
    }
    with contextlib.ExitStack() as stack:
        for path, value in instead.items():
            stack.enter_context(mock.patch(path, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Copies())
        yield counts


def run_case(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train a step, compute log-probs, offload and onload the states, and train again; count the transfers of a step.

    Args:
        model: Directory of the model, of which only the configuration is read.
        settings: Arguments of `make_spec`, with `lora` as a mapping; `loss`, the settings of the policy's loss;
            `holds_reference`; and `media_dir`, the media of the model, with which every sample then has images.
    """
    import torch
    from training_helpers import make_batch, make_spec
    from worlds.vision_batches import media_batch
    from worlds.vision_models import VisionWorld

    from roll.algorithms.losses import PolicyLoss
    from roll.config.model import LoRAConfig
    from roll.training import TorchBackend
    from roll.types import ForwardOptions

    loss, holds_reference = PolicyLoss(**settings.pop("loss", {})), settings.pop("holds_reference", False)
    lora = settings.pop("lora", None)
    if lora is not None:
        settings["lora"] = LoRAConfig(**lora)
    media_dir = settings.pop("media_dir", None)
    spec = make_spec(Path(model), max_tokens_per_micro_batch=60 if media_dir is None else 120, **settings)
    batch = make_batch()
    if media_dir is not None:
        spec = dataclasses.replace(spec, media_dir=Path(media_dir))
        batch = media_batch(VisionWorld.create(Path(model), Path(media_dir)))
    cuda = torch.device("cuda", 0)
    with fake_cuda() as counts:
        backend = TorchBackend(dataclasses.replace(spec, device="cuda", holds_reference=holds_reference))
        share = backend._passes._build_micro_batches(batch, every_token=False, needs=loss.needs)
        backend.train_step(batch, loss)
        counts.clear()
        backend.train_step(batch, loss)
        found = dict(counts) | {"micro_batches": len(share)}
        backend.forward(batch, ["logprobs"])
        backend.forward(batch, ["top_logprobs"], ForwardOptions(num_top=3))
        backend.offload(["parameters", "optimizer"])
        assert {tensor.device.type for tensor in _list_states(backend)} == {"cpu"}
        backend.onload(["parameters", "optimizer"])
        found_on = {tensor.device for tensor in _list_states(backend)}
        assert found_on == ({cuda, torch.device("cpu")} if spec.training.offload_optimizer else {cuda})
        backend.train_step(batch, loss)
    return found


def run_diffusion_cases() -> list[dict[str, Any]]:
    """Train a step with each loss of diffusion models whose terms are inputs of the denoiser; count its transfers."""
    from worlds.diffusion_models import make_spec
    from worlds.diffusion_ranks import LOSSES, make_batch

    from roll.diffusion.trainer import DiffusionTrainer

    found = []
    spec = make_spec()
    batch = dataclasses.replace(make_batch(DiffusionTrainer(spec)), micro_batch_size=4)  # sampling reads its results
    for name in ("flow_matching", "flow_grpo", "nft", "dpo"):
        loss: Any = LOSSES[name]
        with fake_cuda() as counts:
            trainer = DiffusionTrainer(dataclasses.replace(spec, device="cuda"))
            trainer.start_old_policy()
            trainer.train_step(batch, loss)
            counts.clear()
            result = trainer.train_step(batch, loss)
        passes = -(-result.num_tokens // batch.micro_batch_size) * (1 + len(loss.needs))
        found.append(dict(counts) | {"name": name, "passes": passes, "others": len(loss.needs)})
    return found


def _list_states(backend: Any) -> list[Any]:
    """Return all tensors of the weights and of the optimizer."""
    held = [*backend.network.parameters(), *backend.network.buffers()]
    held += [backend.masters.get_local(name) for name in backend.masters.parameters]
    return held + [moment for moments in backend.optimizer.get_moments().values() for moment in moments.values()]


def main() -> None:
    """Load the library, then PyTorch, and run the cases."""
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    if sys.argv[2] == "diffusion":
        print(*map(json.dumps, run_diffusion_cases()), sep="\n")
        return
    for case in json.loads(Path(sys.argv[2]).read_text()):
        try:
            result = run_case(case["model"], case["settings"])
        except Exception:
            result = {"error": traceback.format_exc()[-3000:]}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
