"""`roll view`: filters, the table, and the full screen, driven by Textual's own pilot."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.tracking.conftest import make_config, make_group
from worlds import tiny_model

from roll.cli.main import run as roll
from roll.cli.view.index import RolloutFile, list_rollout_files, parse_filter, sort_rows
from roll.errors import UserError
from roll.tracking import RunDirectory
from roll.tracking.rollout_table import write_rollouts
from roll.types import Group

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m [bold red]markup[/] \u202egnp.exe \u2066x [@click=app.quit]y[/]\ttab\nline"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Two steps of two groups and an evaluation; step 2 has a rollout with hostile text."""
    config = make_config(tmp_path / "runs")
    settings = config.model_dump(mode="json")
    settings["model"]["path"] = str(tmp_path / "no-model")
    with RunDirectory.create(config.run_dir, settings) as directory:
        for step in (1, 2):
            groups = [make_group(2 * step), make_group(2 * step + 1, (None, 0.25))]
            if step == 2:
                groups[0] = _saying(groups[0], HOSTILE)
            write_rollouts(directory.get_rollouts_path(step), step, groups, {f"{2 * step}.0": 1.5})
        write_rollouts(directory.get_evaluation_path(2), 2, [make_group(0)])
    return directory


def _saying(group: Group, text: str) -> Group:
    first = group.rollouts[0]
    assert first.reward is not None
    hostile = replace(first, text=text, reward=replace(first.reward, verdict=text))
    return replace(group, rollouts=(hostile, *group.rollouts[1:]))


def _ids(run: RunDirectory, text: str) -> list[str]:
    wanted = parse_filter(text)
    return [row.values["id"] for file in list_rollout_files(run.rollouts_dir) for row in file.read_rows(wanted)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["4.0", "4.1", "5.0", "5.1", "0.0", "0.1", "2.0", "2.1", "3.0", "3.1"]),
        ("step=1", ["2.0", "2.1", "3.0", "3.1"]),
        ("step=0..1 reward>=0.25", ["2.0", "3.1"]),
        ("kind=eval", ["0.0", "0.1"]),
        ("kind!=train correct=yes", ["0.0"]),
        ("correct=yes", ["4.0", "0.0", "2.0"]),
        ("reward!=0..0.5 kind=train", ["4.0", "2.0"]),
        ("advantage>1", ["4.0", "2.0"]),
        ("status=infra_error", ["5.0", "3.0"]),
        ("tokens=3 draw=3", ["3.0", "3.1"]),
        ('"ANSWER is 3"', ["2.1", "3.0"]),
        ("gnp.exe", ["4.0"]),
        ("'3 + 1 =' 4.", ["3.1"]),
    ],
)
def test_cli_view_a_filter_takes_the_rollouts_that_it_describes(
    run: RunDirectory, text: str, expected: list[str]
) -> None:
    assert _ids(run, text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rewrd>1", "unknown column 'rewrd'. Did you mean 'reward'?"),
        ("reward>high", "reward must be a number, as in reward>0.5 or reward=3..7"),
        ("reward>nan", "NaN cannot be compared"),
        ("reward<1..2", "a range must follow = or !=, as in reward=1..2"),
        ("domain>a", "domain is not a number: use domain=…"),
        ('"open', "has an unclosed quotation mark"),
        ("step=1..2..3", "step must be a number"),
    ],
)
def test_cli_view_a_malformed_filter_is_refused_with_what_to_write(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.").replace("?", r"\?")):
        parse_filter(text)


def test_cli_view_rows_without_a_value_come_last_in_either_order(run: RunDirectory) -> None:
    rows = [row for file in list_rollout_files(run.rollouts_dir) for row in file.read_rows(parse_filter("step=1"))]
    assert [row.values["reward"] for row in sort_rows(rows, "reward")] == [0.0, 0.25, 1.0, None]
    assert [row.values["reward"] for row in sort_rows(rows, "-reward")] == [1.0, 0.25, 0.0, None]
    with pytest.raises(UserError, match="unknown column 'rewards'"):
        sort_rows(rows, "-rewards")


def test_cli_view_where_the_output_is_no_terminal_a_table_is_printed(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert roll(["view", str(run.path), "--filter", "step=2 kind=train", "--sort", "-reward", "--limit", "2"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["step", "kind", "id", "reward"]
    assert [line.split()[2] for line in lines] == ["4.0", "5.1"]
    assert all(line.isprintable() for line in lines)
    assert roll(["view", str(run.path), "-f", "reward>9"]) == 0
    assert capsys.readouterr().out == "No rollout matches the filter.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no run 'nowhere'"),
        (["{run}", "-f", "nothing>1"], "unknown column 'nothing'"),
        (["{run}", "-s", "nothing"], "unknown column 'nothing'"),
    ],
)
def test_cli_view_a_mistake_gets_one_message(
    run: RunDirectory, arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert roll(["view", *(part.format(run=run.path) for part in arguments)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"PAR1 not really PAR1", b"\x00" * 4096], ids=["empty", "torn", "zeros"])
def test_cli_view_a_corrupted_file_is_named_and_the_others_are_shown(
    run: RunDirectory, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    run.get_rollouts_path(2).write_bytes(content)
    assert roll(["view", str(run.path)]) == 0
    said = capsys.readouterr()
    assert "the rollouts in" in said.err and "step-000002.parquet' cannot be read" in said.err
    assert said.out.count("train") == 4 and said.out.count("eval") == 2
    run.get_rollouts_path(1).write_bytes(content)
    run.get_evaluation_path(2).write_bytes(content)
    assert roll(["view", str(run.path)]) == 2


def test_cli_view_a_table_of_something_else_is_named(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"step": [1], "text": ["a"]}), run.get_rollouts_path(2))
    assert roll(["view", str(run.path)]) == 0
    assert "cannot be read: the column 'rollout_id' is missing" in capsys.readouterr().err


def test_cli_view_a_file_of_an_earlier_version_is_shown_without_the_columns_that_it_lacks(run: RunDirectory) -> None:
    import pyarrow.parquet as pq

    path = run.get_rollouts_path(2)
    later = ["step", "engine_id", "components", "policy_versions", "logprobs", "verdict"]
    pq.write_table(pq.read_table(path).drop_columns(later), path)
    rows = [
        row
        for file in list_rollout_files(run.rollouts_dir)
        for row in file.read_rows(parse_filter("kind=train step=2"))
    ]
    assert [row.values["id"] for row in rows] == ["4.0", "4.1", "5.0", "5.1"]
    first = rows[0].values
    assert (first["step"], first["tokens"], first["engine"], first["verdict"]) == (2, 3, None, None)
    assert rows[0].file.read_rollout(0)["components"] is None
    tokens = rows[0].file.read_rollout(0, tokens=True)
    assert len(tokens["token_ids"]) == 3 and tokens["logprobs"] is None


def test_cli_view_what_is_no_regular_file_is_not_opened(run: RunDirectory) -> None:
    os.mkfifo(run.get_rollouts_path(3))
    run.get_rollouts_path(4).mkdir()
    assert [(file.kind, file.step) for file in list_rollout_files(run.rollouts_dir)] == [
        ("train", 2),
        ("eval", 2),
        ("train", 1),
    ]


def test_cli_view_a_number_that_is_none_comes_last_in_either_order(run: RunDirectory) -> None:
    for file in list_rollout_files(run.rollouts_dir):
        _spoil_file(file.path, "reward", [0.5, math.nan, 1.0, math.nan][: 2 if file.kind == "eval" else 4])
    rows = [row for file in list_rollout_files(run.rollouts_dir) for row in file.read_rows(parse_filter("kind=train"))]
    found = [str(row.values["reward"]) for row in sort_rows(rows, "reward")]
    assert found == ["0.5", "0.5", "1.0", "1.0", *["nan"] * 4]
    found = [str(row.values["reward"]) for row in sort_rows(rows, "-reward")]
    assert found == ["1.0", "1.0", "0.5", "0.5", *["nan"] * 4]


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("policy_versions", "x"),
        ("reward", [1.0]),
        ("verdict", [1.0]),
        ("text", b"\xff"),
        ("messages", [1]),
        ("components", 1.5),
    ],
)
def test_cli_view_a_column_of_another_type_is_named(
    run: RunDirectory, column: str, cell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _spoil(run, column, cell)
    asked = ["view", str(run.path), "--filter", "reward>0", "--sort", "verdict"]
    (file, *_) = list_rollout_files(run.rollouts_dir)
    with pytest.raises(UserError, match=r"step-000002\.parquet' cannot be read"):
        file.read_rollout(0, tokens=column == "policy_versions")
    if column not in ("text", "messages", "components", "policy_versions"):  # which a list does not read
        assert roll(asked) == 0  # with the other files
        said = capsys.readouterr()
        assert said.err.startswith("Skipped: ") and said.err.count("\n") == 1
        assert "2.0" in said.out and "4.0" not in said.out


def test_cli_view_what_is_null_is_shown_as_such(run: RunDirectory) -> None:
    pytest.importorskip("textual")
    from roll.cli.view.screen import describe_rollout
    from roll.cli.view.tokens import format_tokens

    _spoil(run, "logprobs", [None])
    _spoil(run, "messages", [None, {"role": None, "content": None}])
    (file, *_) = list_rollout_files(run.rollouts_dir)
    assert [cell.plain for cell in format_tokens(file.read_rollout(0, tokens=True), str)[0]][3:5] == ["nan", "nan%"]
    assert "answer of the model" in describe_rollout(file.read_rollout(0)).plain
    assert "a –" in describe_rollout({"components": [("a", None)]}).plain
    assert describe_rollout({"step": 12345678, "advantage": -0.70710678118}).plain.startswith(
        "step 12345678  advantage -0.7071  "
    )


def test_cli_view_a_rollout_that_a_resume_has_dropped_is_said(run: RunDirectory) -> None:
    (file, *_) = list_rollout_files(run.rollouts_dir)
    rows = list(file.read_rows(parse_filter("")))
    write_rollouts(run.get_rollouts_path(2), 2, [make_group(4, (1.0,))])
    with pytest.raises(UserError, match="fewer rollouts than before: read the files again"):
        rows[-1].file.read_rollout(rows[-1].number)


def _spoil(run: RunDirectory, column: str, cell: Any) -> None:
    _spoil_file(run.get_rollouts_path(2), column, [cell] * 4)


def _spoil_file(path: Path, column: str, cells: Sequence[Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    place = table.schema.get_field_index(column)
    pq.write_table(table.set_column(place, column, pa.array(cells)), path)


def test_cli_view_a_run_without_rollouts_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path / "runs")
    RunDirectory.create(config.run_dir, config.model_dump(mode="json")).close()
    assert roll(["view", str(config.run_dir)]) == 2
    assert "tracking.rollouts=false" in capsys.readouterr().err
    (config.run_dir / "samples").mkdir()  # of a diffusion model
    assert roll(["view", str(config.run_dir)]) == 2
    assert "generates images, not text, so it has no rollouts: its samples are" in capsys.readouterr().err


# ---- the full screen


def _app(run: RunDirectory, filters: str = "", sort: str = ""):
    pytest.importorskip("textual")
    from roll.cli.view.screen import RolloutApp

    return RolloutApp(run, filters, sort)


async def _settled(app, pilot) -> None:
    await app.workers.wait_for_complete()
    await pilot.pause()


def _screen(app) -> str:
    """What the terminal would show."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


async def test_cli_view_the_screen_lists_filters_and_sorts(run: RunDirectory) -> None:
    app = _app(run)
    async with app.run_test(size=(120, 40)) as pilot:
        await _settled(app, pilot)
        assert "10 rollouts" in _screen(app)
        await pilot.press("slash", *"step=1", "enter")
        await _settled(app, pilot)
        assert [row.values["id"] for row in app.rows] == ["2.0", "2.1", "3.0", "3.1"]
        await pilot.press("s")
        assert [row.values["id"] for row in app.rows] == ["2.0", "3.1", "2.1", "3.0"]
        await pilot.press("slash", *" rewrd>1", "enter")
        await _settled(app, pilot)
        assert "Did you mean 'reward'?" in _screen(app)
        assert len(app.rows) == 4  # the list stays as it was


async def test_cli_view_a_rollout_its_group_and_its_tokens_open_and_close(run: RunDirectory) -> None:
    app = _app(run, "step=1")
    async with app.run_test(size=(130, 40)) as pilot:
        await _settled(app, pilot)
        await pilot.press("down", "enter")
        await pilot.pause()
        assert "The answer is 3." in _screen(app) and "reference" in _screen(app)
        await pilot.press("escape", "g")
        await pilot.pause()
        assert "The answer is 2." in _screen(app) and "The answer is 3." in _screen(app)
        assert "2 + 1 =" in _screen(app)
        await pilot.press("escape", "t")
        await _settled(app, pilot)
        lines = _screen(app)
        assert "3 tokens. Only token ids are shown" in lines  # since the model is not there
        assert "-0.2500" in lines and "77.9%" in lines  # exp(-0.25)
        await pilot.press("escape", "question_mark")
        await pilot.pause()
        assert "side by side" in _screen(app)
        await pilot.press("escape", "q")
    assert app.return_code == 0


async def test_cli_view_hostile_text_does_not_act_on_the_terminal_or_the_screen(run: RunDirectory) -> None:
    app = _app(run, "gnp.exe")
    async with app.run_test(size=(160, 40)) as pilot:
        await _settled(app, pilot)
        seen = [_screen(app)]
        for keys in (["enter"], ["escape", "g"], ["escape", "t"]):
            await pilot.press(*keys)
            await _settled(app, pilot)
            seen.append(_screen(app))
        for text in seen:
            assert all(c.isprintable() or c == "\n" for c in text)
        assert (
            "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m [bold red]markup[/] \\x202egnp.exe \\x2066x [@click=app.quit]y[/]"
            in seen[1]
        )


async def test_cli_view_an_answer_of_ten_megabytes_is_shown_from_its_beginning(run: RunDirectory) -> None:
    write_rollouts(run.get_rollouts_path(3), 3, [_saying(make_group(6), "begin " + "\x1b[31mx" * 1_700_000)])
    app = _app(run, "step=3")
    async with app.run_test(size=(120, 40)) as pilot:
        await _settled(app, pilot)
        await pilot.press("enter")
        await pilot.pause()
        assert "begin" in _screen(app) and "\\x1b[31mx\\x1b[31mx" in _screen(app)
        (shown,) = app.screen.query(".reading")
        text = str(shown.render())
        assert len(text) < 100_000 and "and 10180006 characters" in text


async def test_cli_view_tokens_are_spelt_by_the_runs_model(tmp_path: Path, run: RunDirectory) -> None:
    tiny_model.write_tiny_model(tmp_path / "no-model")
    app = _app(run, "step=1")
    async with app.run_test(size=(120, 40)) as pilot:
        await _settled(app, pilot)
        await pilot.press("t")
        await _settled(app, pilot)
        assert "Only token ids are shown" not in _screen(app)


async def test_cli_view_tokens_are_spelt_by_the_tokenizer_that_the_run_kept(tmp_path: Path, run: RunDirectory) -> None:
    tiny_model.write_tiny_model(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "tokenizer.json").rename(run.tokenizer_path)
    app = _app(run, "step=1")
    async with app.run_test(size=(120, 40)) as pilot:
        await _settled(app, pilot)
        await pilot.press("t")
        await _settled(app, pilot)
        assert "Only token ids are shown" not in _screen(app)


async def test_cli_view_a_corrupted_file_leaves_the_others_readable(run: RunDirectory) -> None:
    run.get_rollouts_path(2).write_bytes(b"torn")
    app = _app(run)
    async with app.run_test(size=(200, 40)) as pilot:
        await _settled(app, pilot)
        assert len(app.rows) == 6
        assert "step-000002.parquet" in _screen(app)


def test_cli_view_only_files_of_rollouts_are_read(run: RunDirectory) -> None:
    for name in ("notes.parquet", "step-x.parquet", ".step-000009.parquet.tmp"):
        (run.rollouts_dir / name).write_bytes(b"")
    assert [(file.kind, file.step) for file in list_rollout_files(run.rollouts_dir)] == [
        ("train", 2), ("eval", 2), ("train", 1),
    ]  # fmt: skip
    assert isinstance(list_rollout_files(run.rollouts_dir)[0], RolloutFile)
