"""Files of rollouts that expand to far more than they are: read in portions, cut, or refused by what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roll.dashboard.file_columns import read_columns
from roll.errors import RunDirectoryError
from roll.tracking.reading.files import SafeDirectory
from roll.tracking.reading.rollout_files import contains_text, factorize_texts, open_rollout_file, parse_file_name

NAME = "step-000001.parquet"
MANY = 50_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "rollouts").mkdir()
    return tmp_path


def write(run: Path, columns: dict[str, Any], **options: Any) -> None:
    pq.write_table(pa.table(columns), run / "rollouts" / NAME, **options)


def shared_text(run: Path) -> None:
    """A file of less than 2 MiB whose texts are 50 GB: all rows have the same one."""
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(MANY, np.int32)), pa.array(["Aé" * 500_000]))
    write(run, {"text": text, "verdict": text, "reward": np.arange(float(MANY))})


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("step-000001.parquet", (1, "train")),
        ("eval-step-000020.parquet", (20, "eval")),
        ("step-1234567.parquet", (1_234_567, "train")),
        ("step-1.parquet", None),
        ("step-9999999999.parquet", None),
        (".step-000001.parquet.tmp", None),
    ],
)
def test_tracking_rollout_reader_the_name_of_a_file_says_what_it_holds(
    name: str, place: tuple[int, str] | None
) -> None:
    assert parse_file_name(name) == place


def test_tracking_rollout_reader_a_text_that_all_rows_share_is_held_once(run: Path) -> None:
    shared_text(run)
    before = pa.total_allocated_bytes()
    with open_rollout_file(SafeDirectory(run), NAME) as file:
        most = rows = 0
        for portion in file.iter_batches(("text", "verdict")):
            assert (
                contains_text(portion.column("text"), "É").all()
                and not contains_text(portion.column("text"), "b").any()
            )
            most, rows = max(most, pa.total_allocated_bytes() - before), rows + portion.num_rows
        assert rows == MANY
        assert most < 2**27
        assert file.read_excerpts([0, MANY - 1], "text", 3) == ["AéA", "AéA"]
    previews: list[tuple[str, str]] = []
    columns = read_columns(SafeDirectory(run), NAME, previews.extend)
    assert len(previews) == MANY and previews[-1] == ("", "Aé" * 100)
    assert columns.labels["verdict"][1] == ["", "Aé" * 100] and columns.numbers["reward"][-1] == MANY - 1


def test_tracking_rollout_reader_rows_that_are_too_large_together_are_refused_and_one_of_them_is_read(
    run: Path,
) -> None:
    shared_text(run)
    with open_rollout_file(SafeDirectory(run), NAME) as file:
        assert len(file.read_rows([MANY - 1], ("text",))[0]["text"]) == 1_000_000
    with (
        pytest.raises(RunDirectoryError, match="larger than 64 MiB"),
        open_rollout_file(SafeDirectory(run), NAME) as file,
    ):
        file.read_rows(range(60), ("text",))


def test_tracking_rollout_reader_messages_that_share_a_text_are_counted_as_often_as_they_stand_there(run: Path) -> None:
    message = {"role": "user", "content": "x" * 1_000_000}
    write(run, {"messages": [[message] * 100, [message]]})
    with open_rollout_file(SafeDirectory(run), NAME) as file:
        assert file.read_rows([1])[0]["messages"] == [message]
    with (
        pytest.raises(RunDirectoryError, match="larger than 64 MiB"),
        open_rollout_file(SafeDirectory(run), NAME) as file,
    ):
        file.read_rows([0])


def test_tracking_rollout_reader_a_row_group_of_gigabytes_is_refused_by_its_metadata(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = pa.ListArray.from_arrays(pa.array([0, 2**21, 2**22], pa.int32()), pa.array(np.zeros(2**22, np.int32)))
    write(run, {"token_ids": zeros, "reward": [0.0, 1.0]})
    assert (run / "rollouts" / NAME).stat().st_size < 2**16
    monkeypatch.setattr("roll.tracking.reading.rollout_files._MAX_GROUP_BYTES", 2**24)
    with (
        pytest.raises(RunDirectoryError, match=r"0\.0 GiB in one row group: it was not written by a run"),
        open_rollout_file(SafeDirectory(run), NAME) as file,
    ):
        list(file.iter_batches(("token_ids",)))
    with open_rollout_file(SafeDirectory(run), NAME) as file:  # columns that are not asked for do not count
        assert [row["reward"] for row in file.read_rows([1, 0], ("reward",))] == [1.0, 0.0]


def test_tracking_rollout_reader_portions_are_as_long_as_their_values_allow(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, {"token_ids": [[0] * 100] * 1000, "reward": np.arange(1000.0)}, row_group_size=500)
    monkeypatch.setattr("roll.tracking.reading.rollout_files._PORTION_BYTES", 100 * 8 * 70)
    with open_rollout_file(SafeDirectory(run), NAME) as file:
        sizes = [portion.num_rows for portion in file.iter_batches(("token_ids",))]
        assert sum(sizes) == 1000 and max(sizes) == 70
        found = file.read_rows([999, 3, 71, 3, 500], ("reward",))
    assert [row["reward"] for row in found] == [999.0, 3.0, 71.0, 3.0, 500.0]


def test_tracking_rollout_reader_distinct_texts_of_rows_without_some(run: Path) -> None:
    plain = pa.array(["b", None, "a"])
    for column in (plain, plain.dictionary_encode(), pa.array([None, None], pa.string()).dictionary_encode()):
        codes, texts = factorize_texts(column)
        values = [*texts.to_pylist(), None]
        assert [values[code] for code in codes] == column.to_pylist()


def test_tracking_rollout_reader_a_row_that_is_gone_is_said(run: Path) -> None:
    write(run, {"reward": [0.0]})
    for place in (1, -1):
        with (
            pytest.raises(RunDirectoryError, match="fewer rollouts than before: read the files again"),
            open_rollout_file(SafeDirectory(run), NAME) as file,
        ):
            file.read_rows([place])
