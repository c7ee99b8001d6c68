"""`roll reward test`: files of answers, what is printed, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.cli.answer_files import encode_words, read_answers
from roll.cli.main import run
from roll.errors import DataError

GOOD: list[dict[str, Any]] = [
    {"response": "The answer is 7.", "answer": "7", "expected": True},
    {"response": "8", "answer": 7, "question": "3 + 4?", "expected": False},
    {"text": "7", "reference": "7", "finished": False, "expected": 0},
    {"completion": "\\boxed{7}", "ground_truth": "7", "metadata": {"level": 3}, "extra": "x", "expected": 1.0},
]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_cli_reward_test_a_table_a_summary_and_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "answers.jsonl", [GOOD[0], "", *GOOD[1:]])
    assert run(["reward", "test", file, "-r", "math", "-j", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["line", "value", "math", "time", "verdict", "answer"]
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["1", "1", "1"],
        ["3", "0", "0"],
        ["4", "0", "0"],
        ["5", "1", "1"],
    ]
    summary = "\n".join(lines[5:])
    for words in (
        "4 answers, 4 scored",
        "accuracy   50.0% of 4",
        "component  math: mean 0.5 of 4",
        "4 of 4 results are as expected",
    ):
        assert words in summary
    assert "correct 2, wrong 1, unfinished 1" in summary


def test_cli_reward_test_what_comes_out_otherwise_than_expected_is_told_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", [GOOD[0], {**GOOD[1], "expected": True}])
    assert run(["reward", "test", file, "-r", "math"]) == 1
    out = capsys.readouterr().out
    assert "wrong (expected: true)" in out and "1 of 2 results are as expected; other results in lines 2" in out


def test_cli_reward_test_says_which_keys_may_have_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", [{"response": "7", "solution": "7"}])
    assert run(["reward", "test", file, "-r", "math"]) == 2
    said = capsys.readouterr().err
    assert "line 1: the reward 'math' requires a reference answer" in said
    assert "add the key answer or reference or ground_truth. Other keys of the line: 'solution'." in said


def test_cli_reward_test_marks_answers_of_which_only_the_end_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = "x" * 40, "y" * 41
    file = write(tmp_path / "a.jsonl", [{"response": short, "answer": "7"}, {"response": long, "answer": "7"}])
    assert run(["reward", "test", file, "-r", "exact"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:3]
    assert rows[0].endswith(f"  {'x' * 40}") and rows[1].endswith(f"  …{'y' * 39}")


def test_cli_reward_test_json_lines_for_other_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "a.jsonl", GOOD)
    weighted = "{type: exact, weight: 0, name: same}"
    assert run(["reward", "test", file, "-r", "math", "-r", weighted, "--json", "--limit", "2"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["line"] == 1 and first["components"] == {"math": 1.0, "same": 0.0}
    assert first["correct"] is True  # the second is only watched
    assert second["value"] == 0.0 and second["as_expected"] is True


def test_cli_reward_test_one_that_cannot_be_scored_is_told_and_the_others_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"response": "no comma", "instruction_id_list": ["punctuation:no_comma"]},
        {"response": "no comma", "instruction_id_list": ["punctuation:no_coma"]},
    ]
    assert run(["reward", "test", write(tmp_path / "a.jsonl", rows), "-r", "instructions"]) == 1
    out = capsys.readouterr().out
    assert "follows all" in out
    assert "not scored: prompt 'line 2': it cannot be scored: unknown instruction 'punctuation:no_coma'" in out
    assert "2 answers, 1 scored" in out


def test_cli_reward_test_why_answers_were_not_scored_is_said_in_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def reward(text, answer, metadata):\n    pass\n\nclass Scorer:\n    def __call__(self, *given): ...\n"
    )
    path = write(tmp_path / "a.jsonl", [{"response": "a", "answer": "b"}, {"response": "c", "answer": "d"}])
    assert run(["reward", "test", path, "-r", f"{{type: python, function: '{mine}:reward'}}"]) == 1
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not scored lines 1, 2: ")]
    assert "return a number, a bool" in said
    assert run(["reward", "test", path, "-r", f"{{type: python, function: '{mine}:Scorer'}}"]) == 2
    assert "It is a class: specify a function, or an instance of the class." in capsys.readouterr().err


def configuration(tmp_path: Path, domains: list[str]) -> str:
    data = [
        {"source": "arithmetic", "domain": domain, "reward": "math" if i == 0 else {"type": "exact"}}
        for i, domain in enumerate(domains)
    ]
    config = {"name": "x", "model": {"path": "unused"}, "data": data, "training": {"num_steps": 1}}
    return write(tmp_path / "config.yaml", [yaml.safe_dump(config)])


def test_cli_reward_test_a_configurations_rewards_are_used_by_domain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path, ["sums", "texts"])
    rows = [
        {"response": "It is 7", "answer": "7", "domain": "sums", "expected": True},
        {"response": "It is 7", "answer": "7", "domain": "texts", "expected": False},
    ]
    file = write(tmp_path / "a.jsonl", rows)
    assert run(["reward", "test", file, "--config", config]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:2] == ["line", "domain"]
    assert run(["reward", "test", file, "--config", config, "data.1.reward=math"]) == 1  # an override


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", r"line 2: the line is not valid JSON"),
        ("[1]", "line 2: an answer must be a JSON object, got list: '[1]'"),
        ({"respnse": "7"}, "line 2: the key 'response', the answer to score, is missing. Keys: 'respnse'. Did you"),
        ({"response": 7}, "line 2: 'response' must be a string, got 7"),
        ({"response": "7", "answer": ["7"]}, "line 2: 'answer' must be a string or a number, got ['7']"),
        ({"response": "7", "finished": "no"}, "line 2: 'finished' must be true or false, got 'no'"),
        ({"response": "7", "metadata": 3}, "line 2: 'metadata' must be an object, got 3"),
        ({"response": "7", "prompt": 3}, "line 2: the prompt must be a string or a list of chat messages, got 3"),
        ({"response": "7", "expected": "yes"}, "line 2: 'expected' must be true, false or a number, got 'yes'"),
        ({"response": "7"}, "line 2: the reward 'math' requires a reference answer"),
    ],
)
def test_cli_reward_test_a_malformed_line_is_told_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Any, words: str
) -> None:
    file = write(tmp_path / "a.jsonl", [GOOD[0], row])
    assert run(["reward", "test", file, "-r", "math"]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("Error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "exactly one of --config FILE"),
        (["-r", "math", "-c", "x.yaml"], "exactly one of --config FILE"),
        (["-r", "math", "seed=1"], "the override 'seed=1' requires --config"),
        (["-r", "mth"], "got 'mth'. Did you mean 'math'?"),
        (["-r", "{type: math, extrct: boxed}"], "extrct"),
        (["-r", "{type: math"], "is not valid YAML"),
        (["-r", "mine.py:reward"], "write \"{type: python, function: 'mine.py:reward'}\""),
        (["-c", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_cli_reward_test_mistakes_on_the_command_line_are_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(["reward", "test", write(tmp_path / "a.jsonl", GOOD), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_cli_reward_test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reward", "test", str(tmp_path / "none.jsonl"), "-r", "math"]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    assert run(["reward", "test", write(tmp_path / "empty.jsonl", []), "-r", "math"]) == 2
    assert "has no answers" in capsys.readouterr().err
    (tmp_path / "latin.jsonl").write_bytes(b'{"response": "\xe9"}')
    assert run(["reward", "test", str(tmp_path / "latin.jsonl"), "-r", "math"]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_cli_reward_test_a_domain_must_be_named_where_there_are_several(tmp_path: Path) -> None:
    file = Path(write(tmp_path / "a.jsonl", [{"response": "7"}]))
    with pytest.raises(
        DataError, match="the key 'domain' is required because there are several rewards: choose from 'a', 'b'"
    ):
        list(read_answers(file, ["a", "b"], encode_words, None))
    file = Path(write(tmp_path / "b.jsonl", [{"response": "7", "domain": "sum"}]))
    with pytest.raises(DataError, match=r"unknown domain 'sum'. Did you mean 'sums'\? Choose from 'sums', 'b'"):
        list(read_answers(file, ["sums", "b"], encode_words, None))


def test_cli_reward_test_further_keys_are_metadata_and_words_stand_in_for_tokens(tmp_path: Path) -> None:
    file = Path(write(tmp_path / "a.jsonl", [GOOD[3]]))
    (line,) = read_answers(file, [""], encode_words, None)
    assert dict(line.rollout.prompt.metadata) == {"extra": "x", "level": 3}
    assert encode_words("a b a c") == [0, 1, 0, 2]


def test_cli_reward_test_penalties_count_words_without_a_model_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", [{"response": "one two three", "expected": -0.5}])
    assert run(["reward", "test", file, "-r", "{type: length, free_tokens: 2, full_tokens: 4}"]) == 0
    assert "lengths are counted in words" in capsys.readouterr().out
