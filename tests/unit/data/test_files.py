"""JSONL and Parquet files: every malformed one gives a DataError that says where."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pydantic import ValidationError

from roll.config.data import FileData
from roll.data.files import _as_dict, _RepeatedKey
from roll.data.rows import RowItems
from roll.data.tables import load_table_prompts
from roll.errors import DataError
from roll.types import Message, Prompt

GOOD = {"prompt": "1 + 1?", "answer": "2"}


def config(path: Path, **changes: Any) -> FileData:
    return FileData(**{"source": "file", "path": str(path), "reward": "math", "held_out": 0, **changes})


def load(path: Path, *, seed: int = 0, **changes: Any) -> tuple[RowItems[Prompt], RowItems[Prompt]]:
    return load_table_prompts(config(path, **changes), "d", seed)


def prompts(source: RowItems[Prompt]) -> list[Prompt]:
    return [source[i] for i in range(len(source))]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_data_file_rows_become_prompts_with_the_line_as_uid_and_other_columns_as_metadata(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "caf\xc3\xa9?", "answer": 3, "level": [1]}\r\n\n  \n{"prompt": "b", "answer": 0.5}'
    )
    training, held_out = load(path)
    first, second = prompts(training)
    assert len(held_out) == 0
    assert (first.uid, first.domain, first.answer, first.metadata) == ("d/1", "d", "3", {"level": [1]})
    assert first.messages == (Message(role="user", content="café?"),)
    assert (second.uid, second.answer) == ("d/4", "0.5")


def test_data_file_chats_are_kept_and_get_the_system_prompt_only_where_they_have_none(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    with_system = [{"role": "system", "content": "own"}, *chat]
    path = write(tmp_path / "d.jsonl", [{"prompt": chat, "answer": "1"}, {"prompt": with_system, "answer": "1"}])
    first, second = prompts(load(path, system_prompt="ours")[0])
    assert [m.text for m in first.messages] == ["ours", "a", "b", "c"]
    assert [m.text for m in second.messages] == ["own", "a", "b", "c"]


def test_data_file_an_answer_pattern_takes_the_reference_out_of_its_column(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "q", "answer": "so\n#### 1,234 "}])
    assert prompts(load(path, answer_pattern=r"#### (.+)")[0])[0].answer == "1,234"
    with pytest.raises(DataError, match="line 1: answer_pattern 'X: ' does not match"):
        load(path, answer_pattern="X: ")
    with pytest.raises(ValidationError, match="is not a valid regular expression"):
        load(path, answer_pattern="(")


def test_data_file_parquet_gives_the_same_prompts_as_jsonl(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": i, "level": {"a": i}} for i in range(1500)]
    jsonl = write(tmp_path / "d.jsonl", rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    assert prompts(load(jsonl)[0]) == prompts(load(tmp_path / "d.parquet")[0])
    assert len(load(tmp_path / "d.parquet", limit=7)[0]) == len(load(jsonl, limit=7)[0]) == 7


def test_data_file_held_out_prompts_never_occur_in_training_also_when_rows_repeat(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i % 200}", "answer": "1"} for i in range(1000)]
    path = write(tmp_path / "d.jsonl", rows)
    training, held_out = (prompts(side) for side in load(path, held_out=0.3))
    asked, kept = ({p.messages[0].text for p in side} for side in (training, held_out))
    assert not asked & kept and len(asked | kept) == 200
    assert len(training) + len(held_out) == 1000 and 0.2 < len(held_out) / 1000 < 0.4
    assert len({p.uid for p in training + held_out}) == 1000


def test_data_file_the_split_depends_on_the_seed_and_adding_rows_moves_none(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "answer": "1"} for i in range(300)]
    short, long = write(tmp_path / "a.jsonl", rows[:200]), write(tmp_path / "b.jsonl", rows)
    sides = [
        {p.uid for p in prompts(load(path, held_out=0.5, seed=seed)[1])}
        for path, seed in ((short, 1), (long, 1), (short, 2))
    ]
    assert sides[0] < sides[1] and sides[0] != sides[2]


def test_data_file_held_out_prompts_come_shuffled_so_that_the_first_are_a_fair_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": f"q{i}", "answer": "1"} for i in range(400)])
    lines = [int(p.uid.removeprefix("d/")) for p in prompts(load(path, held_out=0.5)[1])]
    assert lines != sorted(lines) and 120 < sum(lines[:40]) / 40 < 280


def test_data_file_a_held_out_file_is_left_out_of_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"q{i}", "answer": "1"} for i in range(10)]
    train, test = write(tmp_path / "train.jsonl", rows), write(tmp_path / "test.jsonl", [*rows[7:], GOOD])
    training, held_out = (prompts(side) for side in load(train, held_out_path=str(test)))
    assert [p.uid for p in training] == [f"d/{i}" for i in range(1, 8)]
    assert sorted(p.uid for p in held_out) == [f"d/held_out/{i}" for i in range(1, 5)]
    assert "3 prompts" in caplog.text and "held out, not trained on" in caplog.text
    with pytest.raises(DataError, match="no row is left to train on"):
        load(train, held_out_path=str(train))


def test_data_file_content_is_read_when_asked_for_and_a_changed_file_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [GOOD] * 1000)
    training, _ = load(path)
    assert training[999].answer == "2"
    path.write_text(path.read_text().replace("1 + 1?", "1 + 2?"))
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="changed while the run was using it"):
        training[5]
    path.unlink()
    with pytest.raises(DataError, match="can no longer be read"):
        training[5]


def test_data_file_the_fingerprint_tells_content_and_order_apart(tmp_path: Path) -> None:
    other = {"prompt": "2 + 2?", "answer": "4"}
    files = [[GOOD, other], [GOOD, other], [other, GOOD], [GOOD, {**other, "answer": "5"}]]
    marks = [load(write(tmp_path / f"{i}.jsonl", rows))[0].fingerprint for i, rows in enumerate(files)]
    assert marks[0] == marks[1] and len(set(marks)) == 3


def _deep(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{not json}", "line 2: the line is not valid JSON"),
        (b'{"prompt": "a", "answer": "b"', "line 2: the line is not valid JSON"),
        (b'["prompt"]', "line 2: a row must be a JSON object, got list"),
        (b"null", "got NoneType"),
        (b"\xff\xfe", "line 2: the line is not UTF-8"),
        (_deep(100_000), "line 2: the line is not valid JSON"),
        (b'{"prompt": "a", "answer": ' + b"1" * 5000 + b"}", "line 2: "),
        (b'{"promt": "a", "answer": "b"}', r"line 2: column 'prompt' does not exist. Did you mean 'promt'\?"),
        (b'{"prompt": "a", "anwser": "b"}', r"column 'answer' does not exist. Did you mean 'anwser'\?"),
        (b"{}", "Available columns: none"),
        (b'{"prompt": "", "answer": "b"}', "must be a string or a list of chat messages"),
        (b'{"prompt": [], "answer": "b"}', "must be a string or a list of chat messages"),
        (b'{"prompt": 3, "answer": "b"}', "got 3"),
        (
            b'{"prompt": [{"role": "alien", "content": "x"}], "answer": "b"}',
            "role must be one of system, user, assistant, tool",
        ),
        (b'{"prompt": [{"role": "user"}], "answer": "b"}', "message 1: `content` must be a string, got None"),
        (b'{"prompt": "a", "answer": "b",}', "line 2: the line is not valid JSON"),
        (b'{"prompt": "a", "answer": "b"},,', "line 2: the line is not valid JSON"),
        (b'{"prompt": "a", "answer": "b", "answer": "c"}', "line 2: the key 'answer' occurs twice"),
        (b'{"prompt": "a", "answer": null}', "'answer' must be a string or a number, got None"),
        (b'{"prompt": "a", "answer": ["b"]}', "must be a string or a number"),
        (
            b'{"prompt": "a", "answer": " "}',
            "line 2: the answer is empty, but the reward 'math' requires a reference answer",
        ),
        (b'{"prompt": "a \\ud800", "answer": "b"}', "not valid Unicode text at character 2"),
        (b'{"prompt": "a", "answer": "\\udfff"}', "'answer' is not valid Unicode"),
    ],
)
def test_data_file_a_malformed_line_is_refused_with_its_number(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=words) as caught:
        load(path)
    assert "bad.jsonl', line 2" in str(caught.value)


def test_data_file_missing_empty_and_unknown_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [GOOD])
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "data.csv").write_text("prompt,answer")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    for name, words in {
        "trian.jsonl": r"does not exist. Did you mean 'train.jsonl'\?",
        "no/where.jsonl": "nor does its directory",
        "empty.jsonl": "has no rows",
        "data.csv": "must be a .jsonl or .parquet file",
        "bad.parquet": "not a readable Parquet file",
        ".": "is a directory: specify a file in it",
    }.items():
        with pytest.raises(DataError, match=words):
            load(tmp_path / name)


def test_data_file_a_relative_path_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"'none\.jsonl' does not exist \(looked for from '{tmp_path}'\)"):
        load(Path("none.jsonl"))
    with pytest.raises(DataError, match=rf"nor does its directory \(looked for from '{tmp_path}'\)"):
        load(Path("no/where.jsonl"))
    with pytest.raises(DataError) as absolute:
        load(tmp_path / "none.jsonl")
    assert "looked for" not in str(absolute.value)


def test_data_file_a_missing_column_lists_the_others_as_they_are_called(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(DataError, match=r"column 'prompt' does not exist.* Available columns: 'question', 'answer'\."):
        load(path)


def test_data_file_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [GOOD])
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(DataError, match="cannot be read"):
        load(path)


def test_data_file_a_reward_that_compares_needs_an_answer_column(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "a"}])
    with pytest.raises(ValidationError, match="requires a reference answer, but answer_key is null"):
        load(path, answer_key=None)
    form = {"type": "regex", "pattern": "!$"}
    assert prompts(load(path, answer_key=None, reward=[form])[0])[0].answer == ""


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
odd_rows = st.dictionaries(st.sampled_from(["prompt", "answer", "promt", "", "\n"]), json_values, max_size=3)
good_lines = st.just(json.dumps(GOOD).encode())
odd_lines = st.one_of(
    st.binary(max_size=40),
    odd_rows.map(lambda row: json.dumps(row).encode()),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.binary(min_size=1, max_size=3).map(lambda noise: json.dumps(GOOD).encode()[:-3] + noise),
)


@settings(max_examples=400, deadline=None)
@given(lines=st.lists(st.one_of(good_lines, odd_lines), max_size=5))
def test_data_file_any_corpus_loads_or_gives_a_data_error_with_a_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        training, _ = load(path)
    except DataError as error:
        assert "corpus.jsonl', line " in str(error) or "has no rows" in str(error)
    else:
        for prompt in prompts(training):
            assert prompt.messages and all(m.text.encode() or True for m in prompt.messages)
            assert prompt.answer.strip()


def test_data_file_name_a_repeated_key_among_many_in_linear_time(tmp_path: Path) -> None:
    compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    pairs: list[tuple[str, Any]] = [(Name(f"k{i}"), 1) for i in range(1000)]
    with pytest.raises(_RepeatedKey, match="'k999'"):
        _as_dict([*pairs, (Name("k999"), 2)])
    assert compared < 10_000
