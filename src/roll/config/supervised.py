"""What the configuration of every run has that learns from given examples, without generating any."""

from __future__ import annotations

from typing import Self

from pydantic import field_validator

from roll.config.base import Section, option
from roll.config.examples import ExampleDataConfig
from roll.config.run import RunConfig
from roll.config.training import TrainingConfig
from roll.errors import ConfigError

__all__ = ["HeldOutConfig", "SupervisedConfig", "SupervisedTraining"]


class SupervisedTraining(TrainingConfig):
    """Optimisation on examples; a run ends with its steps or its epochs, whichever come first."""

    num_steps: int = option(0, "Steps of the run, at most; 0: as many as `num_epochs` needs.", ge=0, examples=[100])
    num_epochs: float | None = option(
        None, "Passes over the data, at most; without it and without `num_steps` there is one.", gt=0, examples=[2]
    )
    learning_rate: float = option(1e-5, "Peak learning rate of AdamW.", gt=0)
    examples_per_step: int = option(32, "Examples behind one optimiser step, over all ranks.", ge=1)
    max_example_tokens: int | None = option(
        None, "Longest example; by default what the model was made for.", unit="tokens", ge=2
    )
    share_prefix: bool = option(True, "Compute what the two answers of a pair have in common once.")

    def most_draws(self, num_examples: int) -> int | None:
        """Draws after which the epochs are over; `None` where steps alone end the run.

        Args:
            num_examples: of all sources together.
        """
        epochs = self.num_epochs if self.num_epochs or self.num_steps else 1.0
        return None if epochs is None else max(round(epochs * num_examples), 1)

    def within(self, num_examples: int) -> Self:
        """The same with the number of steps that the run has.

        Raises:
            ConfigError: the warm-up is longer.
        """
        draws = self.most_draws(num_examples)
        steps = [self.num_steps] if self.num_steps else []
        steps += [-(-draws // self.examples_per_step)] if draws is not None else []
        if self.warmup_steps > min(steps):
            raise ConfigError(
                f"training.warmup_steps {self.warmup_steps} exceeds the {min(steps)} steps that {num_examples} "
                f"examples and examples_per_step {self.examples_per_step} make: lower it, or raise num_epochs."
            )
        return self.model_copy(update={"num_steps": min(steps)})


class HeldOutConfig(Section):
    """The loss on examples that are not trained on."""

    every_num_steps: int = option(50, "Measure every N steps; 0 means only before and after training.", ge=0)
    num_examples: int = option(256, "Held-out examples to use, at most.", ge=1)
    before_training: bool = option(True, "Also measure before the first step.")


class SupervisedConfig(RunConfig):
    """Sections of learning from examples; a pipeline adds what it learns by."""

    data: list[ExampleDataConfig] = option(
        ...,
        "Sources of examples; several are mixed, each example once in an epoch unless they have weights.",
        min_length=1,
        examples=[[{"source": "file", "path": "data/chats.jsonl"}]],
    )
    training: SupervisedTraining = option(SupervisedTraining(), "How the model is updated.")
    evaluation: HeldOutConfig = option(HeldOutConfig(), "How the model is measured on held-out examples.")

    @field_validator("data")
    @classmethod
    def _domains(cls, value: list[ExampleDataConfig]) -> list[ExampleDataConfig]:
        names = [entry.domain or entry.source for entry in value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several sources are called {twice}: give each its own `domain`")
        return value
