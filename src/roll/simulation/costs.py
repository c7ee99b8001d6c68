"""The cost of an engine step, a training step, and the transfer of weights on given hardware: a roofline model.

One engine step decodes one token of every running request, and may also prefill some prompt tokens:

    step = overhead + decoding requests x host time + tokens x communication
           + max(reading the weights once, tokens x FLOPs per token)      (only of experts that the router chose)
           + context tokens of decoding requests x reading their keys and values
           + (query, key) pairs of prefilled tokens x attention FLOPs

Small batches are memory-bound (the first argument of max), large ones compute-bound. Between two changes of the batch
the context grows by one token per request and step, so the time of n steps is a quadratic polynomial of n; the engine
model relies on that. See "Roofline" (Williams et al., CACM 2009) and "Efficiently Scaling Transformer Inference" (arXiv
2211.05102, section 3) for the counts.

For a measured engine (`roll simulate --calibrate`), a curve replaces all terms that depend on the number of requests:

    step = curve(requests in the step) + further prefilled tokens x seconds + context tokens x seconds + pairs x seconds

The curve is linear between the measured numbers of requests and requires no model of the hardware.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, fields, replace

from roll.config.simulated_placement import DEVICES_PER_MACHINE
from roll.errors import ConfigError
from roll.simulation.hardware import Device, Model

__all__ = [
    "EngineCosts",
    "compute_engine_costs",
    "compute_kv_capacity",
    "compute_sync_s",
    "compute_train_s",
    "interpolate",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCosts:
    """Coefficients of the duration of an engine's step, in seconds."""

    overhead_s: float = 0.0
    """Overhead of every step: launches, scheduling, latency of collectives."""
    weights_s: float = 0.0
    """Time to read all weights that every token uses (for a dense model, all weights) once."""
    experts_s: float = 0.0
    """Time to read all routed experts once."""
    chosen_share: float = 1.0
    """Fraction of a layer's experts that the router chooses for one token."""
    token_s: float = 0.0
    """Compute time of all linear layers, per token in the step."""
    communication_s: float = 0.0
    """Communication time per token in the step."""
    request_s: float = 0.0
    """Host time (scheduling, sampling, stop checks) per decoding request."""
    context_s: float = 0.0
    """Time to read keys and values, per context token of a decoding request."""
    pair_s: float = 0.0
    """Time for attention of prefilled tokens, per (query, key) pair."""
    curve: tuple[tuple[float, float], ...] = ()
    """For a measured engine: (number of requests, seconds of a step without context) pairs, in ascending order. Then
    only the fields `token_s` (for prefilled tokens), `context_s` and `pair_s` are also used.
    """

    def scale(self, factor: float) -> EngineCosts:
        """Return the costs of an engine whose steps take `factor` times as long."""
        seconds = {
            field.name: factor * getattr(self, field.name) for field in fields(self) if field.name.endswith("_s")
        }
        return replace(self, **seconds, curve=tuple((number, factor * step_s) for number, step_s in self.curve))

    def compute_decode_s(self, num_requests: int) -> float:
        """Return the duration of a step that decodes `num_requests` tokens, without the time to read the KV cache."""
        return self.compute_step_s(num_requests, 0, 0, 0.0)

    def compute_step_s(
        self, num_decoding: int, num_prefilled: int, context_tokens: float, pairs: float, num_prefilling: int = 0
    ) -> float:
        """Return the duration of one engine step.

        Args:
            num_decoding: Number of requests that decode a token.
            num_prefilled: Number of prompt tokens to prefill.
            context_tokens: Total context of all decoding requests.
            pairs: (query, key) pairs of the prefilled tokens.
            num_prefilling: Number of requests with prefilled tokens; used only for a measured engine.
        """
        if self.curve:
            further = max(0, num_prefilled - num_prefilling) * self.token_s
            attention = context_tokens * self.context_s + pairs * self.pair_s
            return max(0.0, interpolate(self.curve, num_decoding + num_prefilling)) + further + attention
        tokens = num_decoding + num_prefilled
        # Tokens are assumed to choose experts independently: each is read with probability 1 - (1 - share)^tokens.
        weights_s = self.weights_s + self.experts_s * (1 - (1 - self.chosen_share) ** tokens)
        linear = max(weights_s, tokens * self.token_s) + tokens * self.communication_s
        host = self.overhead_s + num_decoding * self.request_s
        return host + linear + context_tokens * self.context_s + pairs * self.pair_s


def interpolate(curve: tuple[tuple[float, float], ...], x: float) -> float:
    """Return the value at `x` of the piecewise linear curve through the points; extrapolate beyond the ends."""
    if len(curve) == 1:
        return curve[0][1]
    place = min(max(bisect_right(curve, (x, float("inf"))), 1), len(curve) - 1)
    (left, low), (right, high) = curve[place - 1], curve[place]
    return low + (high - low) * (x - left) / (right - left)


def compute_engine_costs(model: Model, device: Device, tensor_parallel: int) -> EngineCosts:
    """Return the step costs of an engine that shards the model over `tensor_parallel` devices.

    Raises:
        ConfigError: The device was measured with another model or another tensor-parallel size.
    """
    measured = device.measured
    if measured is not None and (measured.model, measured.tensor_parallel) != (model.name, tensor_parallel):
        raise ConfigError(
            f"device '{device.name}' was measured with {measured.model} on {measured.tensor_parallel} device(s), not "
            f"with {model.name} on {tensor_parallel}: calibrate with the latter, or remove `measured`."
        )
    bandwidth = device.memory_bandwidth * device.bandwidth_efficiency * tensor_parallel
    flops = device.flops * device.compute_efficiency * tensor_parallel
    latency, per_token = _compute_collectives(model, device, tensor_parallel)
    pair_s = 4 * model.num_layers * model.query_size / flops
    if measured is not None:
        return EngineCosts(
            token_s=measured.prefill_token_s,
            context_s=measured.context_token_s,
            pair_s=pair_s,
            curve=measured.curve,
        )
    expert_bytes = model.expert_parameters * model.element_bytes
    return EngineCosts(
        overhead_s=device.step_overhead_s + latency,
        weights_s=(model.active_bytes - model.active_expert_fraction * expert_bytes) / bandwidth,
        experts_s=expert_bytes / bandwidth,
        chosen_share=model.active_expert_fraction,
        token_s=2 * model.active_parameters / flops,
        communication_s=per_token,
        request_s=device.request_overhead_s,
        context_s=model.kv_bytes_per_token / bandwidth,
        pair_s=pair_s,
    )


def _compute_collectives(model: Model, device: Device, tensor_parallel: int) -> tuple[float, float]:
    """Return the time of two all-reduces per layer: the latency per step, and the transfer time per token.

    A ring all-reduce over n devices moves 2 (n-1)/n of the data.
    """
    if tensor_parallel == 1:
        return 0.0, 0.0
    number = 2 * model.num_layers
    bandwidth = device.link_bandwidth if tensor_parallel <= DEVICES_PER_MACHINE else device.network_bandwidth
    moved = 2 * (tensor_parallel - 1) / tensor_parallel * model.hidden_size * model.element_bytes
    return number * device.collective_latency_s, number * moved / bandwidth


def compute_kv_capacity(model: Model, device: Device, tensor_parallel: int, memory_fraction: float) -> int:
    """Return the number of KV cache tokens that fit next to the weights; 0 or less if the weights do not fit.

    Args:
        model: The model.
        device: Device of the engine.
        tensor_parallel: Number of devices of the engine.
        memory_fraction: Fraction of each device's memory for weights and KV cache.
    """
    free = device.memory_bytes * memory_fraction * tensor_parallel - model.weight_bytes
    return int(free // model.kv_bytes_per_token)


def compute_train_s(
    model: Model, device: Device, num_devices: int, num_tokens: int, mean_length: float, *, passes: float
) -> float:
    """Return the duration of an update, or of a forward pass, over `num_tokens`.

    A forward pass takes 2 FLOPs per parameter and token, and 4 x layers x width FLOPs per (query, key) pair; causal
    attention computes half of all pairs. A backward pass takes twice as many FLOPs (arXiv 2001.08361, section 2.1).

    Args:
        model: The trained model.
        device: Device of the trainer.
        num_devices: Number of devices that share the tokens.
        num_tokens: Tokens of prompts and answers, over all samples.
        mean_length: Mean length of a sample in tokens, weighted by tokens; a token attends to half of this length on
            average.
        passes: Amount of compute, in forward passes: 1 for log-probs, 3 for an update, 4 with activation checkpointing.
    """
    per_token = 2 * model.active_parameters + 4 * model.num_layers * model.query_size * mean_length / 2
    return passes * num_tokens * per_token / (num_devices * device.flops * device.training_efficiency)


def compute_sync_s(model: Model, device: Device, *, colocated: bool, quantized: bool = False) -> float:
    """Return the duration of a weight sync, in which all engines receive the weights concurrently.

    If trainer and engines are `colocated`, the weights are sent over `link_bandwidth`, otherwise over
    `network_bandwidth`; if `quantized`, linear weights are sent with 8 bits per element.
    """
    bandwidth = device.link_bandwidth if colocated else device.network_bandwidth
    saved = model.linear_parameters * (model.element_bytes - 1) if quantized else 0
    return device.sync_overhead_s + (model.weight_bytes - saved) / bandwidth
