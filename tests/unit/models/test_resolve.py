"""What a user may call a model, and what they are told when there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from roll.errors import ModelError
from roll.models import find_model, resolve_model


def make_runs(directory: Path, *names: str, saved: bool = False) -> None:
    for name in names:
        (directory / name).mkdir(parents=True)
        (directory / name / "config.yaml").write_text("name: x")
        if saved:
            model = directory / name / "checkpoints" / "step-000001" / "model"
            model.mkdir(parents=True)
            (model / "config.json").write_text("{}")


@pytest.fixture
def model_copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_model_resolve_a_local_directory_is_itself(tiny_model: Path) -> None:
    assert resolve_model(str(tiny_model)) == tiny_model.resolve() == find_model(tiny_model)


def test_model_resolve_a_relative_directory_is_found(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_model.parent)
    assert resolve_model(tiny_model.name) == tiny_model.resolve()


@pytest.mark.parametrize(
    ("removed", "message"),
    [("config.json", r"no config\.json"), ("model.safetensors", "no weights")],
)
def test_model_resolve_an_incomplete_directory_says_what_it_lacks(model_copy: Path, removed: str, message: str) -> None:
    (model_copy / removed).unlink()
    with pytest.raises(ModelError, match=message):
        resolve_model(model_copy)


def test_model_resolve_a_directory_without_a_tokenizer_is_refused(model_copy: Path) -> None:
    (model_copy / "tokenizer.json").unlink()
    (model_copy / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        resolve_model(model_copy)


def test_model_resolve_weights_in_the_older_format_get_a_hint(model_copy: Path) -> None:
    (model_copy / "model.safetensors").rename(model_copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match="convert them to safetensors"):
        resolve_model(model_copy)


def test_model_resolve_a_missing_shard_is_named(model_copy: Path) -> None:
    (model_copy / "model.safetensors").rename(model_copy / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model_copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"missing 1 of 2 .*model-00002-of-00002"):
        resolve_model(model_copy)


def test_model_resolve_a_broken_index_is_named(model_copy: Path) -> None:
    (model_copy / "model.safetensors.index.json").write_text("[1, 2]")
    with pytest.raises(ModelError, match=r"index\.json.*JSON object"):
        resolve_model(model_copy)


def test_model_resolve_a_misspelt_catalogue_name_gets_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Did you mean 'smollm2-135m-instruct'\?"):
        resolve_model("smollm2-135m-instuct")


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/place", "~/no-such-model", "a/b/c"])
def test_model_resolve_a_path_that_is_not_there_never_goes_to_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="is not a directory on this machine"):
        resolve_model(name)


def test_model_resolve_a_run_that_is_not_there_never_goes_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_runs(tmp_path / "runs", "chats", *(f"run-{i:02}" for i in range(11)), saved=True)
    make_runs(tmp_path / "runs", "chat-begun")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_model("runs/chat")
    assert str(caught.value).startswith(
        f"model 'runs/chat' is not a directory on this machine (looked for from '{tmp_path}'). Did you mean 'chats'? "
        "Runs in 'runs': chats, run-00, run-01, run-02, run-03, run-04, run-05, run-06, run-07, run-08 and 2 more."
    )


def test_model_resolve_a_run_that_has_saved_nothing_has_no_model_yet(tmp_path: Path) -> None:
    make_runs(tmp_path, "begun")
    with pytest.raises(ModelError, match=r"run '.*begun' has no checkpoint yet"):
        resolve_model(tmp_path / "begun")


def test_model_resolve_a_file_is_not_a_model(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="is a file, not a model directory"):
        resolve_model(tiny_model / "config.json")


def resolve_with_hub(endpoint: str, name: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because the hub's address is read once, at import."""
    program = (
        "import sys; from roll.errors import ModelError; from roll.models import resolve_model\n"
        f"try: print(resolve_model({name!r}))\n"
        "except ModelError as error: print('ModelError:', error)"
    )
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120, env=environment
    )


def test_model_resolve_an_unreachable_hub_gives_one_clear_message(tmp_path: Path) -> None:
    done = resolve_with_hub("http://127.0.0.1:9", "owner/smollm2-135m", tmp_path)
    assert done.stdout.startswith(
        "ModelError: model 'owner/smollm2-135m' is not a directory on this machine and could not be "
    )
    assert "Did you mean 'smollm2-135m-instruct'?" in done.stdout
    assert len(done.stdout.strip().splitlines()) == 1


def test_model_resolve_an_impossible_hub_id_is_refused(tmp_path: Path) -> None:
    done = resolve_with_hub("http://127.0.0.1:9", "own er/mo?del", tmp_path)
    assert "is not a valid Hub ID" in done.stdout


def test_model_resolve_a_hub_model_is_downloaded_once_and_found_again_without_the_hub(
    tiny_model: Path, tmp_path: Path, small_hub: str
) -> None:
    first = resolve_with_hub(small_hub, "owner/tiny", tmp_path).stdout.strip()
    assert (Path(first) / "model.safetensors").read_bytes() == (tiny_model / "model.safetensors").read_bytes()
    assert resolve_with_hub("http://127.0.0.1:9", "owner/tiny", tmp_path).stdout.strip() == first


def test_model_resolve_a_model_that_the_hub_does_not_have(tmp_path: Path, small_hub: str) -> None:
    done = resolve_with_hub(small_hub, "owner/other", tmp_path)
    assert done.stdout.startswith(
        "ModelError: model 'owner/other' is not a directory on this machine and could not be "
    )


def test_model_resolve_an_index_that_is_no_index_is_refused(model_copy: Path) -> None:
    (model_copy / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')
    with pytest.raises(ModelError, match="must have a 'weight_map'"):
        resolve_model(str(model_copy))


def test_model_resolve_an_index_of_a_name_that_no_file_can_have_is_refused(model_copy: Path) -> None:
    (model_copy / "model.safetensors").unlink()
    (model_copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 100_000}}))
    with pytest.raises(ModelError, match=r"missing 1 of 1 weight files, for example 'x+\.\.\.: copy"):
        resolve_model(str(model_copy))


def test_model_resolve_a_weight_file_that_is_no_file_is_not_waited_for(model_copy: Path) -> None:
    (model_copy / "model.safetensors").unlink()
    os.mkfifo(model_copy / "model.safetensors")
    with pytest.raises(ModelError, match=r"has no weights: the file 'model.safetensors' is missing"):
        resolve_model(model_copy)
