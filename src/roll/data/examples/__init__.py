"""Examples: what is learnt from as it is, from rows of data sets to training samples."""

from roll.data.examples.build import Examples, build_examples, num_examples
from roll.data.examples.reading import Kind
from roll.data.examples.report import Report
from roll.data.examples.samples import SkippedExample, UnusableExample, samples_of
from roll.data.examples.stream import ExampleStream

__all__ = [
    "ExampleStream",
    "Examples",
    "Kind",
    "Report",
    "SkippedExample",
    "UnusableExample",
    "build_examples",
    "num_examples",
    "samples_of",
]
