"""`training.backend` chooses what a trainer's ranks are made of."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import roll
from roll.cluster.local import LocalCluster
from roll.config.load import load_config
from roll.config.model import ModelConfig
from roll.config.training import TRAINERS, TrainingConfig
from roll.errors import ConfigError
from roll.protocols import TrainBackend
from roll.training import TrainerSpec
from roll.types import ForwardOptions

RUN = {
    "name": "test",
    "model": {"path": "tiny"},
    "data": [{"source": "arithmetic", "reward": "math"}],
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4},
    "training": {"num_steps": 1},
}


class Echo:
    """A back-end that says what it was built from."""

    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec

    def forward(self, batch: Any, outputs: Any, options: Any = None) -> dict[str, Any]:
        return {name: [self.spec.model_path, options] for name in outputs}


@pytest.fixture(autouse=True)
def _own_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRAINERS, "_entries", dict(TRAINERS._entries))


def with_backend(name: str) -> dict[str, Any]:
    return RUN | {"training": {"num_steps": 1, "backend": name}}


def test_cluster_backend_an_unknown_name_is_refused_when_the_configuration_is_loaded() -> None:
    with pytest.raises(
        ConfigError, match=r"'troch'\. Did you mean 'torch'\? Known: deepspeed, megatron, torch, path/to/file"
    ):
        load_config(with_backend("troch"))
    assert load_config(RUN).training.backend == "torch"


@pytest.mark.parametrize("name", ["torch", "deepspeed", "megatron"])
def test_cluster_backend_every_back_end_takes_what_a_group_of_ranks_passes_on(name: str) -> None:
    made = TRAINERS.get(name)
    for method in (name for name in vars(TrainBackend) if not name.startswith("_")):
        asked, own = (list(inspect.signature(getattr(of, method)).parameters) for of in (TrainBackend, made))
        assert own == asked, method


@pytest.mark.parametrize("backend", ["echo", f"{__file__}:Echo"])
async def test_cluster_backend_a_back_end_of_the_users_runs_the_trainer(backend: str) -> None:
    TRAINERS.register("echo", f"{__name__}:Echo")
    training = TrainingConfig(num_steps=1, backend=backend)
    group = await LocalCluster().start_trainer(
        TrainerSpec(model_path="here", model=ModelConfig(path="here"), training=training), "actor_train"
    )
    try:
        said: Any = await group.forward("a batch", ["values"], ForwardOptions(adapter=False))  # type: ignore[arg-type]
    finally:
        await group.close()
    assert said == {"values": ["here", ForwardOptions(adapter=False)]}
    with pytest.raises(
        ConfigError, match=r"'echo' is already registered as '.*:Echo': register 'a:B' under another name"
    ):
        TRAINERS.register("echo", "a:B")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "class Mine:\n    pass",
            "training.backend 'mine_as_rank.py:Mine' is called with (spec), which () does not",
        ),
        ("class Mine:\n    def __init__(self, spec): ...", "does not define train_step, forward_backward, "),
        ("", "training back-end: 'mine_as_rank.py' has no 'Mine'"),
    ],
)
def test_cluster_backend_a_back_end_of_the_users_that_is_wrong_is_named_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_as_rank.py").write_text(text)
    found = roll.check(with_backend("mine_as_rank.py:Mine")).problems
    assert any(words in problem for problem in found), found


def test_cluster_backend_choosing_by_name_imports_no_torch() -> None:
    code = "import sys; from roll.config.load import load_config; from roll.config.training import TRAINERS; "
    code += "assert 'torch' in TRAINERS and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
