"""Datasets through `datasets`: saved directories, directories of data files, and what is missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from roll.config.data import HuggingFaceData
from roll.data import huggingface
from roll.data.rows import RowItems
from roll.data.tables import load_table_prompts
from roll.errors import DataError
from roll.types import Prompt


def load(path: object, **changes: Any) -> tuple[RowItems[Prompt], RowItems[Prompt]]:
    settings = {"source": "huggingface", "path": str(path), "reward": "math", "held_out": 0, **changes}
    return load_table_prompts(HuggingFaceData(**settings), "d", 0)


def rows(low: int, high: int) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"prompt": f"q{i}", "answer": i, "level": i % 2} for i in range(low, high)])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "both"
    datasets.DatasetDict({"train": rows(0, 8), "test": rows(6, 12)}).save_to_disk(path)
    return path


def test_data_huggingface_a_saved_dataset_gives_prompts_and_leaves_the_held_out_split_out_of_training(
    saved: Path,
) -> None:
    training, held_out = load(saved, held_out_split="test")
    assert [training[i].uid for i in range(len(training))] == [f"d/{i}" for i in range(1, 7)]  # q6 and q7 are in both
    assert sorted(held_out[i].messages[0].text for i in range(6)) == sorted(f"q{i}" for i in range(6, 12))
    assert (training[3].answer, training[3].metadata) == ("3", {"level": 1})


def test_data_huggingface_a_split_saved_alone_serves_as_the_one_asked_for(tmp_path: Path) -> None:
    rows(0, 5).save_to_disk(tmp_path / "one")
    training, _ = load(tmp_path / "one", limit=3)
    assert len(training) == 3
    with pytest.raises(DataError, match=r"has no split 'test'.*Available splits: train"):
        load(tmp_path / "one", held_out_split="test")


def test_data_huggingface_a_directory_of_data_files_is_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    training, held_out = load(tmp_path / "files")
    assert [training[i].answer for i in range(2)] == ["1", "2"] and len(held_out) == 0


@pytest.mark.parametrize("change", ["written anew", "shortened"])
def test_data_huggingface_a_file_that_changes_in_its_place_gives_no_other_rows(tmp_path: Path, change: str) -> None:
    """Rows would be others, or reading them would end the process (SIGBUS)."""
    rows(0, 1000).save_to_disk(tmp_path / "data")
    training, _ = load(tmp_path / "data")
    assert training[900].answer == "900"
    (file,) = (tmp_path / "data").glob("*.arrow")
    file.write_bytes(file.read_bytes().replace(b"q9", b"p9") if change == "written anew" else b"")
    os.utime(file, ns=(0, 0))
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow' changed while the run was using it"):
        training[901]


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_data_huggingface_a_file_that_is_replaced_or_removed_is_still_read(tmp_path: Path, change: str) -> None:
    rows(0, 1000).save_to_disk(tmp_path / "data")
    training, _ = load(tmp_path / "data")
    (file,) = (tmp_path / "data").glob("*.arrow")
    if change == "removed":
        file.unlink()
    else:
        (tmp_path / "other").write_bytes(b"another")
        (tmp_path / "other").replace(file)
    assert training[900].answer == "900"


def test_data_huggingface_of_very_many_files_some_are_looked_at_before_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(0, 6).save_to_disk(tmp_path / "data", num_shards=3)
    monkeypatch.setattr(huggingface, "MAX_CHECKED_FILES", 2)
    training, _ = load(tmp_path / "data")  # looks at the first two
    os.utime(tmp_path / "data" / "data-00001-of-00003.arrow", ns=(0, 0))
    assert training[0].answer == "0"  # the third and the first
    with pytest.raises(DataError, match=r"data-00001-of-00003\.arrow' changed"):
        training[0]


def test_data_huggingface_a_wrong_split_or_column_is_named_with_the_nearest(saved: Path) -> None:
    with pytest.raises(DataError, match=r"has no split 'trian'. Did you mean 'train'\? Available splits: train, test"):
        load(saved, split="trian")
    with pytest.raises(
        DataError, match=r"split 'train', row 1: column 'promt' does not exist. Did you mean 'prompt'\?"
    ):
        load(saved, prompt_key="promt")


def test_data_huggingface_what_cannot_be_loaded_is_a_data_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{")
    for path in (tmp_path / "empty", tmp_path / "broken", "nobody/has-this-dataset-here"):
        with pytest.raises(DataError, match=r"cannot be loaded: .*Specify a directory"):
            load(path)
    assert not datasets.are_progress_bars_disabled()
