"""The stream of training examples."""

from __future__ import annotations

from roll.data.stream import WeightedStream
from roll.types import Example, ExampleDraw

__all__ = ["ExampleStream"]


class ExampleStream(WeightedStream[Example, ExampleDraw]):
    """Draws examples for training; see `WeightedStream`."""

    size_name = "num_examples"

    def _draw(self, draw_id: int, item: Example, position: int) -> ExampleDraw:
        return ExampleDraw(draw_id=draw_id, example=item, position=position)
