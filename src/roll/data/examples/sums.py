"""Sums such as `3 + 4` with their answers: the prompts of `roll.data.arithmetic` as examples."""

from __future__ import annotations

from collections.abc import Collection

from roll.config.examples import ArithmeticExamples
from roll.data.arithmetic import ArithmeticPrompts, arithmetic_prompts
from roll.types import Conversation, Example, Message

__all__ = ["ArithmeticExamplesSource", "arithmetic_examples"]


class ArithmeticExamplesSource:
    """Prompts with their answers; a `Source`."""

    def __init__(self, prompts: ArithmeticPrompts, left_out: Collection[int] = ()) -> None:
        self.fingerprint = prompts.fingerprint
        self._prompts = prompts
        self._numbers = [i for i in range(len(prompts)) if i not in left_out]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Example:
        prompt = self._prompts[self._numbers[index]]
        answer: Message = {"role": "assistant", "content": prompt.answer}
        conversation = Conversation(messages=(*prompt.messages, answer), num_given=len(prompt.messages))
        return Example(uid=prompt.uid, domain=prompt.domain, conversations=(conversation,))

    def where(self, index: int) -> str:
        """The sum, for messages."""
        return self[index].uid

    def without(self, indices: Collection[int]) -> ArithmeticExamplesSource:
        """All but these."""
        return ArithmeticExamplesSource(self._prompts, {self._numbers[i] for i in indices})


def arithmetic_examples(
    config: ArithmeticExamples, domain: str, seed: int
) -> tuple[ArithmeticExamplesSource, ArithmeticExamplesSource]:
    """Training and held-out examples: the same operand pairs as `arithmetic_prompts`.

    Raises:
        DataError: there are too few pairs, or too many.
    """
    training, held_out = arithmetic_prompts(config, domain, seed)
    return ArithmeticExamplesSource(training), ArithmeticExamplesSource(held_out)
