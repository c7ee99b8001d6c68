"""Examples of sums such as `3 + 4`: the prompts of `roll.data.arithmetic` with their answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from roll.config.examples import ArithmeticExamples
from roll.data.arithmetic import ArithmeticPrompts, build_arithmetic_prompts
from roll.types import Conversation, Example, Message

__all__ = ["ArithmeticExamplesSource", "build_arithmetic_examples"]


class ArithmeticExamplesSource:
    """A `Source` of arithmetic examples: prompts with their answers."""

    def __init__(self, prompts: ArithmeticPrompts, answer_template: str, numbers: Sequence[int] | None = None) -> None:
        self.fingerprint = prompts.fingerprint
        self._prompts = prompts
        self._answer_template = answer_template
        self._numbers = range(len(prompts)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Example:
        number = self._numbers[index]
        prompt = self._prompts[number]
        asked = " ".join(map(str, self._prompts.get_terms(number)))
        text = self._answer_template.replace("{sum}", asked).replace("{answer}", prompt.answer)
        answer = Message(role="assistant", content=text)
        conversation = Conversation(messages=(*prompt.messages, answer), num_prompt_messages=len(prompt.messages))
        return Example(uid=prompt.uid, domain=prompt.domain, conversations=(conversation,))

    def describe_location(self, index: int) -> str:
        """Return the UID of an example, which contains the sum, for messages."""
        return self[index].uid

    def exclude(self, indices: Collection[int]) -> ArithmeticExamplesSource:
        """Return a copy of the source without the items at `indices`."""
        kept = [number for i, number in enumerate(self._numbers) if i not in indices]
        return ArithmeticExamplesSource(self._prompts, self._answer_template, kept)


def build_arithmetic_examples(
    config: ArithmeticExamples, domain: str, seed: int
) -> tuple[ArithmeticExamplesSource, ArithmeticExamplesSource]:
    """Build training and held-out examples, with the same operand pairs as `build_arithmetic_prompts`.

    Raises:
        DataError: There are too few pairs, or too many.
    """
    training, held_out = build_arithmetic_prompts(config, domain, seed)
    template = config.answer_template
    return ArithmeticExamplesSource(training, template), ArithmeticExamplesSource(held_out, template)
