"""What a model said is kept by the tokens that it said it of, and read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from roll.pipelines.supervised.output_store import OutputStore, Rows, build_rows
from roll.types import TrainingSample


def sample(draw: int, asked: list[int], answer: list[int]) -> TrainingSample:
    mask = np.array([False] * len(asked) + [True] * len(answer))
    return TrainingSample(
        sample_id=str(draw), unit=draw, token_ids=np.array([*asked, *answer], np.int32), loss_mask=mask
    )


def said(*logprobs: float) -> Rows:
    return build_rows(logprobs=np.array(logprobs, np.float32))


def test_teacher_output_store_what_a_model_said_is_read_again_and_asked_for_once(tmp_path: Path) -> None:
    first, second, longer = sample(0, [1, 2], [3, 4]), sample(1, [1, 2], [3, 5]), sample(2, [1], [2, 3, 4])
    kept = OutputStore(tmp_path)
    again = sample(7, [1, 2], [3, 4])  # the same tokens in another draw
    assert kept.find_missing([first, again, second]) == [first, second]
    kept.add([first, longer], [said(-1, -2.5), said(-3, -4, -5)])
    kept.add([second], [said(-6, -7)])
    for found in (kept, OutputStore(tmp_path)):
        assert found.find_missing([first, again, second, longer]) == []
        assert found.get_rows(again)["logprobs"].tolist() == [-1, -2.5]
        assert found.get_rows(longer)["logprobs"].tolist() == [-3, -4, -5]  # the same tokens, of which others count
        assert found.get_rows(second)["logprobs"].tolist() == [-6, -7]


def test_teacher_output_store_rows_have_several_columns_of_several_widths(tmp_path: Path) -> None:
    one = sample(0, [1], [2, 3])
    ids, logprobs = np.array([[4, 5, 6], [7, 8, 9]], np.uint16), np.log(np.array([[3, 2, 1], [6, 5, 4]], np.float32))
    OutputStore(tmp_path).add([one], [build_rows(token_ids=ids, logprobs=logprobs)])
    rows = OutputStore(tmp_path).get_rows(one)
    assert rows["token_ids"].tolist() == ids.tolist()
    assert rows["logprobs"].tobytes() == logprobs.tobytes()
    assert rows.dtype.itemsize == 3 * (2 + 4)  # nothing but the numbers


@pytest.mark.parametrize("corrupted", ["npz", "npy"])
def test_teacher_output_store_corrupted_files_are_asked_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, corrupted: str
) -> None:
    one, other = sample(0, [1], [2]), sample(1, [1], [3])
    kept = OutputStore(tmp_path)
    kept.add([one], [said(-1)])
    (path,) = tmp_path.glob(f"*.{corrupted}")
    kept.add([other], [said(-2)])
    content = bytearray(path.read_bytes())
    content[-1 if corrupted == "npy" else 100] ^= 1  # one bit
    path.write_bytes(content)
    read = OutputStore(tmp_path)
    assert read.find_missing([one, other]) == [one]
    assert "recomputing the model outputs" in caplog.text
    read.add([one], [said(-1)])
    assert OutputStore(tmp_path).find_missing([one, other]) == []


def test_teacher_output_store_runs_that_share_a_directory_add_to_each_other(tmp_path: Path) -> None:
    one, other = sample(0, [1], [2]), sample(1, [1], [3])
    here, there = OutputStore(tmp_path), OutputStore(tmp_path)
    here.add([one], [said(-1)])
    there.add([other], [said(-2)])
    assert OutputStore(tmp_path).find_missing([one, other]) == []
