"""Examples: what is learnt from as it is, from rows of data sets to training samples."""

from roll.data.examples.build import Examples, build_examples
from roll.data.examples.reading import Kind
from roll.data.examples.samples import SkippedExample, samples_of
from roll.data.examples.stream import ExampleStream

__all__ = ["ExampleStream", "Examples", "Kind", "SkippedExample", "build_examples", "samples_of"]
