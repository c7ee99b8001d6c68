"""Common base of the configurations of runs that train on fixed examples."""

from __future__ import annotations

from typing import Self

from pydantic import ValidationError, field_validator, model_validator

from roll.config.base import Section, option
from roll.config.cluster import RoleDevices
from roll.config.data import DataConfig
from roll.config.examples import ExampleDataConfig
from roll.config.inference import InferenceConfig
from roll.config.rollout import EvaluationConfig, RolloutConfig
from roll.config.rollout_run import PromptRunConfig
from roll.config.run import RunConfig
from roll.config.sandbox import SandboxConfig
from roll.config.sources import validate_unique_names
from roll.config.training import TrainingConfig
from roll.errors import ConfigError

__all__ = ["AnswersConfig", "HeldOutConfig", "SupervisedConfig", "SupervisedTrainingConfig"]


MAX_DRAWS = 2**53
"""Maximum number of examples that a run draws, the largest integer range that is exact as a float."""


class SupervisedTrainingConfig(TrainingConfig):
    """Training on examples. A run ends after `num_steps` or `num_epochs`, whichever comes first."""

    num_steps: int = option(0, "Maximum number of steps; 0: the number that `num_epochs` needs.", ge=0, examples=[100])
    num_epochs: float | None = option(
        None,
        "Maximum number of passes over the data; by default one if `num_steps` is 0, otherwise unlimited.",
        gt=0,
        le=1_000_000,
        examples=[2],
    )
    learning_rate: float = option(1e-5, "Peak learning rate of AdamW.", gt=0)
    examples_per_step: int = option(32, "Number of examples per optimizer step, over all ranks.", ge=1, le=1_000_000)
    max_example_tokens: int | None = option(
        None, "Maximum length of an example; by default the model's context length.", unit="tokens", ge=2
    )
    share_prefix: bool = option(True, "Whether the common prefix of a pair's answers is computed only once.")

    def compute_max_draws(self, num_examples: int) -> int | None:
        """Compute the number of examples to draw in all epochs; `None` if only the number of steps ends the run.

        Args:
            num_examples: total number of examples in all sources.
        """
        epochs = self.num_epochs if self.num_epochs or self.num_steps else 1.0
        return None if epochs is None else max(round(min(epochs * num_examples, MAX_DRAWS)), 1)

    def with_num_steps(self, num_examples: int, step: int = 0, num_drawn: int = 0) -> Self:
        """Return a copy of this section with the run's final number of steps.

        Args:
            num_examples: total number of examples in all sources.
            step: current step of the run. An epoch may have ended inside a step, and earlier steps may have had a
                different size, so the remaining steps are counted from this step.
            num_drawn: number of examples drawn up to this step.

        Raises:
            ConfigError: the warm-up is longer than the run.
        """
        draws = self.compute_max_draws(num_examples)
        steps = [self.num_steps] if self.num_steps else []
        steps += [step - (num_drawn - draws) // self.examples_per_step] if draws is not None else []
        if self.warmup_steps > min(steps):
            raise ConfigError(
                f"training.warmup_steps must be <= the number of steps, got {self.warmup_steps} and {min(steps)} "
                f"steps ({num_examples} examples, examples_per_step {self.examples_per_step}): lower warmup_steps, or "
                "raise num_epochs."
            )
        return self.model_copy(update={"num_steps": min(steps)})


class AnswersConfig(Section):
    """Answers that engines generate whenever the held-out loss is measured, scored like rollouts."""

    data: list[DataConfig] = option(
        ...,
        "Prompt sources; their held-out prompts are used.",
        min_length=1,
        examples=[[{"source": "arithmetic", "reward": "math"}]],
    )
    num_prompts: int = option(64, "Maximum number of held-out prompts.", ge=1)
    samples_per_prompt: int = option(1, "Number of answers per prompt.", ge=1)
    temperature: float = option(0.0, "Sampling temperature; 0 means greedy.", ge=0)
    max_new_tokens: int = option(512, "Maximum length of an answer.", unit="tokens", ge=1)
    inference: InferenceConfig = option(InferenceConfig(), "The engines that generate the answers.")
    sandbox: SandboxConfig = option(SandboxConfig(), "Sandboxes in which the model's programs run.")

    @field_validator("inference")
    @classmethod
    def _check_widths(cls, value: InferenceConfig) -> InferenceConfig:
        if len(value.widths) > 1:
            raise ValueError(
                f"tensor_parallel {value.tensor_parallel} is for engines that generate rollouts to train on: set "
                f"tensor_parallel to one number, such as {value.width}"
            )
        return value


class HeldOutConfig(Section):
    """Evaluation of the loss on examples that are not trained on."""

    every_num_steps: int = option(50, "Measure every N steps; 0 means only before and after training.", ge=0)
    num_examples: int = option(256, "Maximum number of held-out examples.", ge=1)
    before_training: bool = option(True, "Whether to measure before the first step as well.")
    answers: AnswersConfig | None = option(
        None, "Evaluation of answers that engines generate, in addition to the loss; by default no engine is started."
    )


class _AnsweringConfig(PromptRunConfig):
    """The configuration of the engines of `evaluation.answers`, whose messages name the user's keys."""

    def name_key(self, key: str) -> str:
        """Return the key of the supervised run's configuration that sets `key`."""
        if key == "rollout.max_new_tokens":
            return "evaluation.answers.max_new_tokens"
        return f"evaluation.answers.{key}" if key.startswith("inference.") else key

    @property
    def quantization_alternative(self) -> str:
        """The advice in messages about engines that cannot compute in 8 bits; a supervised run has no `weight_sync`."""
        return f"set {self.name_key('inference.quantization')} to none"


class SupervisedConfig(RunConfig):
    """A run that learns from examples; a pipeline adds its objective."""

    data: list[ExampleDataConfig] = option(
        ...,
        "Sources of examples; several are mixed so that each example is drawn once in an epoch, unless they have "
        "weights.",
        min_length=1,
        examples=[[{"source": "file", "path": "data/chats.jsonl"}]],
    )
    training: SupervisedTrainingConfig = option(SupervisedTrainingConfig(), "Training of the model.")
    evaluation: HeldOutConfig = option(HeldOutConfig(), "Evaluation on held-out examples.")

    _check_unique_names = field_validator("data")(validate_unique_names)

    @model_validator(mode="after")
    def _check_answers(self) -> Self:
        try:
            self.build_prompt_run_config()
        except ValidationError as error:
            # Sections are valid here, so only their combination is wrong.
            first = error.errors(include_url=False)[0]
            raise ValueError(str(first.get("ctx", {}).get("error", first["msg"]))) from None
        return self

    @property
    def roles(self) -> dict[str, RoleDevices]:
        """The roles of this run by name: the trainer, and the engines of `evaluation.answers`."""
        roles, answers = super().roles, self.evaluation.answers
        if answers is not None:
            roles["actor_infer"] = RoleDevices(
                kind="engine",
                devices=self.cluster.device_mapping.actor_infer,
                tensor_parallel=answers.inference.width,
                section="evaluation.answers.inference",
                log_name="engine",
            )
        return roles

    def build_prompt_run_config(self) -> PromptRunConfig | None:
        """Build the configuration for starting the engines of `evaluation.answers`; `None` if that key is not set."""
        answers = self.evaluation.answers
        if answers is None:
            return None
        return _AnsweringConfig(
            pipeline=self.pipeline,
            name=self.name,
            output_dir=self.output_dir,
            seed=self.seed,
            model=self.model,
            checkpoint=self.checkpoint,
            cluster=self.cluster,
            tracking=self.tracking,
            alarms=self.alarms,
            data=answers.data,
            rollout=RolloutConfig(max_new_tokens=answers.max_new_tokens),
            inference=answers.inference,
            training=self.training,
            evaluation=EvaluationConfig(
                num_prompts=answers.num_prompts,
                samples_per_prompt=answers.samples_per_prompt,
                temperature=answers.temperature,
            ),
            sandbox=answers.sandbox,
        )
