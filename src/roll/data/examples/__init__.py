"""Examples for offline training: from rows of data sets to training samples."""

from roll.data.examples.build import ExampleData, build_examples, count_examples
from roll.data.examples.reader import ExampleKind
from roll.data.examples.report import ExampleReport
from roll.data.examples.samples import SampleBuilder, UnusableExample, truncate_tokens
from roll.data.examples.stream import ExampleStream

__all__ = [
    "ExampleData",
    "ExampleKind",
    "ExampleReport",
    "ExampleStream",
    "SampleBuilder",
    "UnusableExample",
    "build_examples",
    "count_examples",
    "truncate_tokens",
]
