"""Products in 8-bit floating point: equal to an emulation in float64 and to torchao's, and the same in every row."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from families import FAMILIES, write_model
from torch import Tensor, nn
from torch.nn import functional
from training_helpers import grads_of, logprobs_of, make_batch, make_spec, needs_cuda, relative_error
from worlds.tiny_model import write_tiny_model

from roll.algorithms.losses import LikelihoodLoss, PolicyLoss
from roll.config.load import load_config
from roll.config.model import LoRAConfig
from roll.errors import ConfigError, ModelError
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.training.dry_run import dry_run
from roll.training.network import fp8
from roll.training.spec import TrainerSpec
from roll.types import LossRequirements

RECIPES = ("rowwise_with_gw_hp", "rowwise")
QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"


def rounded(x: Tensor, largest: Tensor) -> Tensor:
    """Float64 numbers as e4m3 has them under a scale: 3 digits after the first, exponents from -6, at most 448."""
    scale = 2.0 ** torch.floor(torch.log2(448.0 / largest))
    scaled = x * scale
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6)))
    step = 2.0 ** (exponent - 3)
    return torch.round(scaled / step) * step / scale


def by_row(x: Tensor) -> Tensor:
    return rounded(x, x.abs().amax(1, keepdim=True).clamp(min=1e-12))


def emulated(x: Tensor, weight: Tensor, grad: Tensor, recipe: str) -> list[tuple[Tensor, Tensor]]:
    """Of output and both gradients, the two matrices that are multiplied, in float64."""
    x, weight, grad = x.double(), weight.double(), grad.double()
    output = by_row(x), by_row(weight).t()
    if recipe == "rowwise":
        return [output, (by_row(grad), by_row(weight.t()).t()), (by_row(grad.t()), by_row(x.t()).t())]
    return [output, (by_row(grad), rounded(weight, weight.abs().max())), (grad.t(), x)]


def operands(num_tokens: int = 37, inputs: int = 64, outputs: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and gradient, bfloat16, of which every row and column has another size; a row is 0."""
    generator = torch.Generator().manual_seed(0)

    def some(rows: int, columns: int) -> Tensor:
        sizes = [2.0 ** torch.randint(-12, 13, shape, generator=generator) for shape in ((rows, 1), (1, columns))]
        return (torch.randn(rows, columns, generator=generator) * sizes[0] * sizes[1]).to(torch.bfloat16)

    x = some(num_tokens, inputs)
    x[3] = 0
    return x, some(outputs, inputs), some(num_tokens, outputs)


def computed(recipe: Any, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    result = fp8._Linear.apply(x, weight, recipe)
    result.backward(grad)
    assert x.grad is not None and weight.grad is not None
    return [result.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("has_rows", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_products_are_those_of_rounded_matrices_in_float64(recipe: str, has_rows: bool) -> None:
    """Up to the rounding of the result to bfloat16 and of its sum to float32."""
    x, weight, grad = operands()
    with mock.patch.object(fp8, "_detect_support", lambda kind: fp8._Fp8Support(torch.float8_e4m3fn, has_rows)):
        found = computed(recipe, x, weight, grad)
    for own, (a, b) in zip(found, emulated(x, weight, grad, recipe), strict=True):
        exact, sizes = a @ b, a.abs() @ b.abs()
        allowed = 2.0**-8 * exact.abs() + 2.0**-20 * sizes + 1e-30
        assert own.dtype == torch.bfloat16 and bool(((own.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_products_are_torchao_s_to_the_bit(recipe: str) -> None:
    linear = pytest.importorskip("torchao.float8.float8_linear")
    config: Any = linear.Float8LinearConfig
    settings = config.from_recipe_name(recipe)
    object.__setattr__(settings, "pad_inner_dim", True)
    x, weight, grad = operands(num_tokens=48)
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=True, dtype=torch.bfloat16)
    plain.weight.data.copy_(weight)
    other = linear.Float8Linear.from_float(plain, settings)
    given = x.clone().requires_grad_()
    other(given).backward(grad)
    expected = [other(x).detach(), given.grad, plain.weight.grad]
    found = computed(recipe, x, weight, grad)
    found[0] = found[0] + plain.bias.detach()
    for own, theirs in zip(found, expected, strict=True):
        assert torch.equal(own, theirs)


def layer_in_8_bits(plain: nn.Linear, recipe: Any = "rowwise") -> nn.Linear:
    plain.forward = fp8._build_fp8_forward(plain, recipe)
    return plain


def test_fp8_a_layer_has_its_bias_and_takes_what_comes(caplog: pytest.LogCaptureFixture) -> None:
    layer = layer_in_8_bits(nn.Linear(32, 16, dtype=torch.bfloat16))
    x = torch.randn(2, 5, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = layer.weight.detach()
    expected = fp8._Linear.apply(x.detach().view(10, 32), weight, "rowwise").view(2, 5, 16) + layer.bias.detach()
    assert torch.equal(layer(x), expected)
    assert layer(x[:, :0]).shape == (2, 0, 16)
    wide = layer.float()
    assert torch.equal(wide(x.float()), functional.linear(x.float(), layer.weight, layer.bias))


def test_fp8_a_frozen_weight_gets_no_gradient_and_its_input_is_not_kept() -> None:
    layer = layer_in_8_bits(nn.Linear(32, 16, bias=False, dtype=torch.bfloat16).requires_grad_(False))
    x = torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        layer(x).sum().backward()
    assert kept == [(16, 32)]
    assert x.grad is not None and layer.weight.grad is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_fp8_what_is_not_finite_stays_so(value: float) -> None:
    x, weight, _ = operands()
    clean = fp8._Linear.apply(x, weight, "rowwise")
    x[5, 2] = value
    found = fp8._Linear.apply(x, weight, "rowwise")
    assert bool(found[5].isnan().all())
    assert torch.equal(found[:5], clean[:5]) and torch.equal(found[6:], clean[6:])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_fp8_what_is_not_finite_in_a_weight_is_seen_by_all_that_share_its_scale(recipe: str, value: float) -> None:
    """Of a whole matrix in one recipe, of an input's column in the other; never a gradient of 0 for some of them."""
    x, weight, grad = operands()
    weight[4, 7] = value
    _, grad_x, _ = computed(recipe, x, weight, grad)
    assert bool(grad_x[:, 7].isnan().all())
    others = torch.arange(grad_x.shape[1]) != 7
    assert bool(
        grad_x[:, others].isnan().all() if recipe == "rowwise_with_gw_hp" else grad_x[:, others].isfinite().all()
    )


def test_fp8_scales_are_torchao_s_down_to_its_smallest_and_no_further() -> None:
    """Gradients are small: at 1e-10 they have all digits; from 1e-12 on, rows share one scale, and 0 has no other."""
    largest = torch.tensor([448.0, 1e-4, 1e-10, 1.01e-12, 1e-13, 1e-30, 0.0]).to(torch.bfloat16)
    expected = 2.0 ** -torch.floor(torch.log2(448.0 / largest.double().clamp(min=1e-12)))
    found = fp8._quantize(largest[:, None].repeat(1, 16), torch.float8_e4m3fn)
    assert torch.equal(found.factor[:, 0].double(), expected)
    assert torch.equal(found.values[2].double() * expected[2], by_row(largest[2:3, None].repeat(1, 16).double())[0])


@pytest.mark.parametrize("has_rows", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_the_forward_pass_alone_adds_up_in_fewer_digits(recipe: str, has_rows: bool) -> None:
    calls: list[bool] = []
    plain = functional.scaled_mm

    def counted(*args: Any, use_fast_accum: bool, **settings: Any) -> Tensor:
        calls.append(use_fast_accum)
        return plain(*args, use_fast_accum=use_fast_accum, **settings)

    with (
        mock.patch.object(fp8, "_detect_support", lambda kind: fp8._Fp8Support(torch.float8_e4m3fn, has_rows)),
        mock.patch.object(functional, "scaled_mm", counted),
    ):
        computed(recipe, *operands())
    assert calls == [True, False] + [False] * (recipe == "rowwise")


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_a_token_s_logprob_is_the_same_whichever_texts_share_its_row(tiny_model: Path, recipe: str) -> None:
    batch = make_batch()
    others = ({"max_tokens_per_micro_batch": 45}, {"share_prefix": False}, {"tiled_mlp_tokens": 7})
    expected = logprobs_of(TorchBackend(make_spec(tiny_model, dtype="bfloat16", fp8=recipe)), batch)
    plain = logprobs_of(TorchBackend(make_spec(tiny_model, dtype="bfloat16")), batch)
    assert max(float(np.abs(a - b).max()) for a, b in zip(expected, plain, strict=True)) > 0.01
    for settings in others:
        found = logprobs_of(TorchBackend(make_spec(tiny_model, dtype="bfloat16", fp8=recipe, **settings)), batch)
        assert max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True)) < 1e-4


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_gradients_are_as_far_off_as_their_numbers_have_fewer_digits(tmp_path: Path, recipe: str) -> None:
    """4 binary digits where bfloat16 has 8: up to 16 times as far from float32."""
    model, batch = write_tiny_model(tmp_path, hidden=128), make_batch()
    exact, plain, own = (
        TorchBackend(make_spec(model, **settings))
        for settings in ({}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "fp8": recipe})
    )
    for backend in (exact, plain, own):
        backend.train_step(batch, PolicyLoss())
    usual, found = (relative_error(grads_of(backend), grads_of(exact)) for backend in (plain, own))
    assert 4 * usual < found < 16 * usual


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_layers_that_run_again_give_the_same_bits(tiny_model: Path, recipe: str) -> None:
    settings = {"dtype": "bfloat16", "fp8": recipe}
    kept, again = (
        TorchBackend(make_spec(tiny_model, **settings, activation_checkpointing=again)) for again in (False, True)
    )
    for backend in (kept, again):
        backend.train_step(make_batch(), PolicyLoss())
    found, expected = grads_of(again), grads_of(kept)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=16)])
def test_fp8_a_reference_of_the_same_weights_is_at_distance_0(tiny_model: Path, lora: LoRAConfig | None) -> None:
    spec, batch = make_spec(tiny_model, dtype="bfloat16", lora=lora, fp8="rowwise"), make_batch()
    policy = TorchBackend(spec)
    reference = TorchBackend(TrainerSpec.for_frozen_model(tiny_model, spec.model, spec.training, 0))
    own = logprobs_of(policy, batch)
    for other in (reference, policy):
        asked = logprobs_of(other, batch, adapter=other is reference or lora is None)
        assert all(np.array_equal(a, b) for a, b in zip(own, asked, strict=True))


def test_fp8_a_teacher_is_computed_in_its_own_format(tiny_model: Path) -> None:
    spec, batch = make_spec(tiny_model, dtype="bfloat16", fp8="rowwise"), make_batch()
    teacher = TorchBackend(TrainerSpec.for_teacher(tiny_model, spec.model, spec.training, 0))
    plain = TorchBackend(make_spec(tiny_model, dtype="bfloat16"))
    pairs = zip(logprobs_of(teacher, batch), logprobs_of(plain, batch), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_fp8_weights_that_leave_and_stay_are_those_of_a_run_without_it(tiny_model: Path, tmp_path: Path) -> None:
    plain, own = (TorchBackend(make_spec(tiny_model, dtype="bfloat16", **s)) for s in ({}, {"fp8": "rowwise"}))
    sent, expected = dict(own.weights()), dict(plain.weights())
    assert sent.keys() == expected.keys() and all(torch.equal(sent[name], expected[name]) for name in expected)
    assert all(own.masters.get_local(name).dtype == torch.float32 for name in own.masters.parameters)
    own.train_step(make_batch(), PolicyLoss())
    own.save(tmp_path)
    plain.load(tmp_path)  # and a run may go on without
    after, expected = dict(plain.weights()), dict(own.weights())
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def test_fp8_only_linear_layers_of_the_decoder_that_choose_nothing_are_taken(tiny_model: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "moe", tiny_model, FAMILIES["deepseek-v3"])
    model: Any = load_causal_lm(path, torch.bfloat16)
    model.model.layers[1].mlp.router = nn.Linear(32, 32)  # of some families it is a linear layer like any other
    before = dict(model.named_modules())
    count = fp8.use_fp8(model, "rowwise")
    changed = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert len(changed) == count and all(before[name] is module for name, module in model.named_modules())
    assert changed == {
        *(f"model.layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in ("q_a", "q_b")),
        *(f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")),
        *(f"model.layers.1.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")),
    }


def test_fp8_layers_of_other_sizes_stay_and_are_counted(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = load_causal_lm(tiny_model, torch.bfloat16)  # keys and values are 16 wide, all others 32 or 64
    with caplog.at_level(logging.WARNING):
        assert fp8.use_fp8(model, "rowwise", tp=2) == 2 * 5
    assert "10 of 14 linear layers of the decoder use FP8" in caplog.text
    assert "multiples of 16 x training.parallel.tp 2" in caplog.text
    with pytest.raises(ModelError, match=r"none of the 14 linear layers .* multiples of 16 x training.parallel.tp 4"):
        fp8.use_fp8(model, "rowwise", tp=4)


def test_fp8_what_cannot_be_is_refused() -> None:
    for changes, said in (
        (["model.dtype=float32"], r"model.dtype bfloat16, got 'float32': set training.fp8 to none"),
        (["training.backend=deepspeed"], "the back-end deepspeed does not support this key:"),
        (["training.backend=megatron"], "the back-end megatron does not support this key:"),
        (["model.lora.base=nf4"], r"4-bit weights \(model.lora.base\)"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(QUICKSTART, ["training.fp8=rowwise", *changes])


def test_fp8_a_device_without_such_products_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for cached in (fp8._detect_support, fp8._warn_slow_on_cpu):
        cached.cache_clear()
    plain = functional.scaled_mm

    def without(kind: Any, *dtypes: torch.dtype) -> Any:
        def product(a: Tensor, b: Tensor, scale: Tensor, recipe: Any, *args: Any, **kwargs: Any) -> Tensor:
            if recipe == kind or a.dtype in dtypes:
                raise RuntimeError("only for compute capability >= 8.9\nat line 7")
            return plain(a, b, scale, recipe, *args, **kwargs)

        return product

    kinds = functional.ScalingType
    monkeypatch.setattr(functional, "scaled_mm", without(kinds.TensorWise))
    with pytest.raises(
        ModelError, match=r"this cpu device does not support \(only for compute capability >= 8.9\): set"
    ):
        fp8.check_fp8_support(torch.device("cpu"))
    monkeypatch.setattr(functional, "scaled_mm", without(kinds.RowWise))
    assert fp8._detect_support("cpu") == (torch.float8_e4m3fn, False)
    fp8._detect_support.cache_clear()
    monkeypatch.setattr(functional, "scaled_mm", plain)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            fp8.check_fp8_support(torch.device("cpu"))
    assert [record.getMessage() for record in caplog.records] == [mock.ANY]
    assert "slower" in caplog.text


def test_fp8_memory_is_what_it_is_without(tmp_path: Path) -> None:
    """Copies in 8 bits live as long as a product: by a dry run, which needs no device."""
    model = write_tiny_model(tmp_path, hidden=256, layers=4)
    batch = make_batch(groups=2, prompt=(100, 101), response=(200, 201))
    peaks = [
        dry_run(make_spec(model, dtype="bfloat16", fp8=recipe), batch, LossRequirements()).peak
        for recipe in ("none", *RECIPES)
    ]
    assert peaks[1:] == pytest.approx(peaks[:1] * 2, rel=0.02)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_a_large_layer_is_faster_than_in_bfloat16(recipe: Any) -> None:
    fp8.check_fp8_support(torch.device("cuda"))
    plain, own = (nn.Linear(4096, 14336, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    layer_in_8_bits(own, recipe)
    x = torch.randn(8192, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    taken = []
    for layer in (plain, own):
        times = []
        for _ in range(8):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            layer(x).sum().backward()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        taken.append(sorted(times)[2])
    print(f"\n{recipe}: {taken[1]:.2f} ms, bfloat16 {taken[0]:.2f} ms")
    assert taken[1] < taken[0]


def test_fp8_a_rank_s_part_of_a_row_is_rounded_as_in_the_whole_row() -> None:
    """Its scale may be another; both are powers of two, and nothing here is 2^14 times smaller than the largest."""
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x = torch.where(x.abs() < 2.0**-6, 0.5, x)
    x[:, 7] = 100.0  # all parts but the first have smaller scales than the whole

    def read(part: Tensor) -> Tensor:
        values, factor = fp8._quantize(part, torch.float8_e4m3fn)
        return values.float() * factor

    assert torch.equal(torch.cat([read(part) for part in x.split(16, dim=1)], dim=1), read(x))


@pytest.mark.slow
def test_fp8_thirty_steps_learn_what_they_learn_in_bfloat16(tmp_path: Path) -> None:
    """Next tokens of a fixed text: the loss falls to a tenth, and both losses are near to each other on the way."""
    model = write_tiny_model(tmp_path, hidden=128)
    batch = make_batch(group_size=1, groups=8, prompt=(2, 3), response=(12, 14))
    losses = []
    for recipe in ("none", *RECIPES):
        backend = TorchBackend(make_spec(model, dtype="bfloat16", fp8=recipe, num_steps=30, learning_rate=3e-3))
        losses.append([backend.train_step(batch, LikelihoodLoss()).loss for _ in range(30)])
    plain, *others = losses
    assert plain[-1] < 0.1 * plain[0]
    for found in others:
        assert found[-1] < 0.1 * found[0]
        assert max(abs(a - b) for a, b in zip(found, plain, strict=True)) < 0.1 * plain[0]
        assert found != plain
    print("\n" + "  ".join(f"{found[0]:.3f} → {found[-1]:.4f}" for found in losses))
