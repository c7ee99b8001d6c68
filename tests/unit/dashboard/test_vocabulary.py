"""Tokenizers of runs: loaded once, whatever is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from roll.dashboard import vocabulary
from roll.dashboard.vocabulary import TOKENIZER_FILE, Vocabularies
from roll.tracking.reading.files import SafeDirectory


def test_dashboard_vocabulary_a_broken_tokenizer_is_parsed_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    load = vocabulary._load_tokenizer
    monkeypatch.setattr(
        vocabulary, "_load_tokenizer", lambda content, name: [parsed.append(content), load(content, name)][1]
    )
    found = Vocabularies()
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        (tmp_path / run / TOKENIZER_FILE).write_text("{}")
        for _ in range(3):
            assert found.find(SafeDirectory(tmp_path / run)) is None
    assert parsed == [b"{}"]
    Tokenizer(WordLevel({"one": 0}, unk_token="one")).save(str(tmp_path / "a" / TOKENIZER_FILE))
    good = found.find(SafeDirectory(tmp_path / "a"))
    assert good is not None and good.decode_tokens([0]) == ["one"]
    assert found.find(SafeDirectory(tmp_path / "a")) is good
    assert len(parsed) == 2


def test_dashboard_vocabulary_a_tokenizer_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / TOKENIZER_FILE).open("wb") as file:
        file.truncate(vocabulary._MAX_FILE_BYTES + 1)
    monkeypatch.setattr(SafeDirectory, "read", lambda *_, **__: pytest.fail("it is read"))
    assert Vocabularies().find(SafeDirectory(tmp_path)) is None
