"""A thousand bad inputs: a thousand clear messages, exit code 2, no traceback, nothing written."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from bad_inputs import BASE, CONFIGS, FILE, bad_data_file, written

from roll.cli.main import run
from roll.config.load import load_config
from roll.errors import DataError, UserError

pytestmark = pytest.mark.integration

PER_KIND = 90
NUM_DATA_FILES = 200


def test_cli_bad_input_what_is_broken_below_is_right_before(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(written(BASE))
    assert load_config(path).name == "quickstart"


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_cli_bad_input_every_bad_configuration_gets_one_clear_message(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = Path(FILE)
    for seed in range(PER_KIND):
        content, overrides, name = kind(random.Random(f"{kind.__name__}/{seed}"))
        path.write_bytes(content)
        about = f"seed {seed}: {content[:300]!r} {overrides}"
        with pytest.raises(UserError):  # else the command below would start to train
            load_config(path, overrides)
        code = run(["train", str(path), *overrides])
        captured = capsys.readouterr()
        assert code == 2, about
        assert captured.out == "", about
        check_message(captured.err, about, name)
    assert list(tmp_path.iterdir()) == [tmp_path / FILE]


def check_message(text: str, about: str, name: str) -> None:
    assert text.startswith("Error: "), f"{about}: {text}"
    assert len(text.strip()) > 25, f"{about}: {text}"
    assert "Traceback" not in text and "pydantic" not in text.lower(), f"{about}: {text}"
    assert name in text, f"{about}: {text} does not name {name}"
    body = text.strip().splitlines()
    assert len(body) == 1 or "problems in the configuration:" in body[0], f"{about}: {text}"
    assert len(body) <= 22, f"{about}: {text}"
    assert all(line.isprintable() for line in body), f"{about}: {text}"


def test_cli_bad_input_every_bad_data_file_gets_one_clear_message(tmp_path):
    from roll.data.build import SOURCES

    for seed in range(NUM_DATA_FILES):
        directory = tmp_path / str(seed)
        directory.mkdir()
        path, options = bad_data_file(random.Random(seed), directory)
        entry = {"source": "file", "path": str(path), "reward": "exact", **options}
        config = load_config({**BASE, "data": [entry]})
        with pytest.raises(DataError) as caught:
            SOURCES.get("file")(config.data[0], "file", 0)
        message = str(caught.value)
        assert path.name in message, f"seed {seed}: {message}"
        first, *rows = message.splitlines()
        assert not rows or re.match(r"[\d,]+ of [\d,]+ rows of data source 'file' cannot be used:$", first), message
        assert len(rows) <= 5 * 2 + 1, f"seed {seed}: {message}"


def test_cli_bad_input_a_file_of_the_other_kind_is_said_to_be_that(tmp_path, capsys):
    simulation = tmp_path / "simulation.yaml"
    simulation.write_text("device: h800\nmodel: qwen2.5-7b\nanswer_tokens: {mean: 100}\nvariants: {a: {}}\n")
    path = tmp_path / "config.yaml"
    path.write_bytes(written(BASE))
    for command in ("check", "train"):
        assert run([command, str(simulation)]) == 2
        assert "describes a simulation, not a run: use it with `roll simulate`" in capsys.readouterr().err
    assert run(["simulate", str(path)]) == 2
    assert "describes a run, not a simulation: use it with `roll train`" in capsys.readouterr().err
    assert run(["check", str(tmp_path)]) == 2
    assert f"Is a directory. The configuration of this run is '{path}'" in capsys.readouterr().err
