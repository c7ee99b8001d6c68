"""The stream of examples: every one once in an epoch, the same draws however they are taken, resumable anywhere."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from roll.config.examples import FileExamples
from roll.data.examples import ExampleStream, build_examples
from roll.data.stream import WeightedSource
from roll.errors import CheckpointError
from roll.models import load_tokenizer
from roll.types import Conversation, Example


def stream_of(sizes: list[int], weights: list[float] | None = None, seed: int = 0) -> ExampleStream:
    sources = []
    for number, size in enumerate(sizes):
        domain = f"d{number}"
        items = [
            Example(uid=f"{domain}/{i}", domain=domain, conversations=(Conversation(text="a"),)) for i in range(size)
        ]
        weight = weights[number] if weights else float(size)
        sources.append(WeightedSource(domain=domain, items=items, weight=weight, fingerprint="f"))
    return ExampleStream(sources, seed)


sizes = st.lists(st.integers(1, 30), min_size=1, max_size=5)


@given(sizes=sizes, seed=st.integers(0, 3), epochs=st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_examples_stream_without_weights_every_example_comes_once_in_every_epoch(
    sizes: list[int], seed: int, epochs: int
) -> None:
    stream = stream_of(sizes, seed=seed)
    for _ in range(epochs):
        assert set(Counter(draw.uid for draw in stream.draw(sum(sizes))).values()) == {1}
        assert stream.num_drawn % sum(sizes) == 0


@given(sizes=sizes, data=st.data())
@settings(deadline=None, max_examples=60)
def test_examples_stream_with_weights_each_sources_examples_come_once_before_any_comes_again(
    sizes: list[int], data: st.DataObject
) -> None:
    weights = [data.draw(st.floats(0.1, 10)) for _ in sizes]
    drawn = stream_of(sizes, weights).draw(120)
    assert [draw.draw_id for draw in drawn] == [*range(120)]
    for number, size in enumerate(sizes):
        own = [draw for draw in drawn if draw.example.domain == f"d{number}"]
        assert [draw.position for draw in own] == [*range(len(own))]
        for start in range(0, len(own), size):
            epoch = [draw.uid for draw in own[start : start + size]]
            assert len(set(epoch)) == len(epoch)
        assert abs(len(own) - 120 * weights[number] / sum(weights)) < len(sizes)


@given(sizes=sizes, parts=st.lists(st.integers(0, 9), max_size=6), cut=st.integers(0, 6))
@settings(deadline=None, max_examples=60)
def test_examples_stream_draws_depend_on_nothing_but_their_number(sizes: list[int], parts: list[int], cut: int) -> None:
    whole = stream_of(sizes).draw(sum(parts))
    stream, drawn = stream_of(sizes), []
    for index, part in enumerate(parts):
        if index == cut:
            state = json.loads(json.dumps(stream.state()))
            stream = stream_of(sizes)
            stream.restore(state)
        drawn += stream.draw(part)
    assert drawn == whole
    assert [stream.redraw(draw.draw_id, draw.example.domain, draw.position) for draw in drawn] == whole


def test_examples_stream_other_examples_are_refused_by_name() -> None:
    state = stream_of([3]).state()
    with pytest.raises(CheckpointError, match="num_examples of source 'd0' was 3 and is 4"):
        stream_of([4]).restore(state)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tiny_model))


def test_examples_stream_the_content_of_rows_decides_whether_a_run_can_go_on(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "rows.jsonl"

    def stream(answers: list[str]) -> ExampleStream:
        path.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": a}) + "\n" for i, a in enumerate(answers)))
        entry = FileExamples(source="file", path=str(path), held_out=0)
        return build_examples([entry], "supervised", tokenizer, 0).train

    state = stream(["a", "b", "c"]).state()
    stream(["a", "b", "c"]).restore(state)
    with pytest.raises(CheckpointError, match="fingerprint of source 'file' was"):
        stream(["a", "b", "d"]).restore(state)


@pytest.mark.integration
def test_examples_stream_memory_holds_a_few_bytes_of_every_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 4 KiB: what reading four times as many costs is far below what they hold."""
    monkeypatch.setattr("roll.data.examples.build.MAX_CHECKED_AT_START", 100)
    monkeypatch.setattr("roll.data.examples.checker.NUM_ESTIMATE_EXAMPLES", 5)

    def peak(num_rows: int) -> int:
        path = tmp_path / f"{num_rows}.jsonl"
        with path.open("w") as file:
            for i in range(num_rows):
                file.write(json.dumps({"prompt": f"{i}?", "completion": "word " * 800}) + "\n")
        tracemalloc.start()
        examples = build_examples([FileExamples(source="file", path=str(path))], "supervised", tokenizer, 0)
        for draw in examples.train.draw(20):
            examples.build_samples(draw)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert examples.train.num_items + len(examples.held_out) == num_rows
        return peak

    peak(500)  # what is imported and kept on first use
    small, large = peak(500), peak(2000)
    assert large - small < 1500 * 200, f"{small:,} and {large:,} bytes"
