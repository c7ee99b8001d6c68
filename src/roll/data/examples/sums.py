"""Sums such as `3 + 4` with their answers: the prompts of `roll.data.arithmetic` as examples."""

from __future__ import annotations

from roll.config.examples import ArithmeticExamples
from roll.data.arithmetic import ArithmeticPrompts, arithmetic_prompts
from roll.types import Conversation, Example, Message

__all__ = ["ArithmeticExamplesSource", "arithmetic_examples"]


class ArithmeticExamplesSource:
    """Every prompt with its answer; a `Source`."""

    def __init__(self, prompts: ArithmeticPrompts) -> None:
        self.fingerprint = prompts.fingerprint
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Example:
        prompt = self._prompts[index]
        answer: Message = {"role": "assistant", "content": prompt.answer}
        conversation = Conversation(messages=(*prompt.messages, answer), num_given=len(prompt.messages))
        return Example(uid=prompt.uid, domain=prompt.domain, conversations=(conversation,))

    def where(self, index: int) -> str:
        """The sum, for messages."""
        return self._prompts[index].uid


def arithmetic_examples(
    config: ArithmeticExamples, domain: str, seed: int
) -> tuple[ArithmeticExamplesSource, ArithmeticExamplesSource]:
    """Training and held-out examples: the same operand pairs as `arithmetic_prompts`.

    Raises:
        DataError: there are too few pairs, or too many.
    """
    training, held_out = arithmetic_prompts(config, domain, seed)
    return ArithmeticExamplesSource(training), ArithmeticExamplesSource(held_out)
