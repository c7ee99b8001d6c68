"""The check of media: rounding of one token is accepted in 16 bits, a different computation is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from roll.errors import ModelError
from roll.models.multimodal import check

NUM_TOKENS = 12


class _Model:
    """A model whose hidden states are all 1."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.training = False
        self.config = SimpleNamespace(to_json_string=lambda use_diff: "{}")

    def __call__(self, **arguments: Any) -> Any:
        return SimpleNamespace(hidden_states=[torch.ones(1, NUM_TOKENS + 1, 4)])

    def parameters(self) -> Any:
        return iter([torch.zeros(1)])

    def eval(self) -> None: ...

    def train(self, mode: bool) -> None: ...


def _check(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, errors: dict[bool, list[float]]) -> bool:
    """Check a model whose tokens have these relative errors, by whether images are read in both directions."""
    monkeypatch.setattr(check, "_cached_results", {})
    monkeypatch.setattr(check, "set_attention", lambda model, attention: None)
    monkeypatch.setattr(check, "_build_example", lambda inputs: (np.arange(NUM_TOKENS + 1), (), {}))
    media: Any = SimpleNamespace(inputs=None, is_bidirectional=False)

    def run(tokens: Any, spans: Any) -> torch.Tensor:
        return torch.ones(NUM_TOKENS, 4) * (1 + torch.tensor(errors[media.is_bidirectional]))[:, None]

    check.check_media(_Model(dtype), media, "eager", run)  # type: ignore[arg-type]
    return media.is_bidirectional


ROUNDING = [0.02] * (NUM_TOKENS - 1) + [0.25]
WRONG_DIRECTION = [0.0] * 4 + [0.3] * 4 + [0.1] * 4


def test_media_check_accepts_one_token_with_a_large_rounding_error_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _check(monkeypatch, torch.bfloat16, {False: ROUNDING, True: WRONG_DIRECTION})


def test_media_check_finds_images_that_are_read_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _check(monkeypatch, torch.bfloat16, {False: WRONG_DIRECTION, True: ROUNDING})


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.15), (torch.float32, 0.002)])
def test_media_check_refuses_another_computation(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, error: float
) -> None:
    errors = [0.0] * 2 + [error] * (NUM_TOKENS - 2)
    with pytest.raises(ModelError, match="differ from those of the model's own forward pass"):
        _check(monkeypatch, dtype, dict.fromkeys((False, True), errors))
