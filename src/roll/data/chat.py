"""Chat rendering, token-exact: messages to the ids that the model was trained to see, and ids back to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.errors import DataError
from roll.types import IntArray, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatRenderer"]


class ChatRenderer:
    """Renders through the tokenizer's own chat template.

    A tokenizer without a template belongs to a base model: its prompts are the messages' texts, a blank line between
    them, with the tokenizer's own special tokens and nothing added.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    def render(self, messages: Sequence[Message]) -> IntArray:
        """[P] ids of the conversation, up to where the assistant's answer begins.

        Raises:
            DataError: the template refuses the conversation (some models have no system role, for instance).
        """
        if self.has_template:
            ids = self._rendered(messages)
        else:
            ids = self._tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def answer(self, text: str) -> IntArray:
        """Ids of an answer as the model would write it, with the token that ends its message.

        Raises:
            DataError: the template begins an assistant's message differently once there is one.
        """
        if not self.has_template:
            ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
            return np.asarray(ids, dtype=np.int32)
        question: list[Message] = [{"role": "user", "content": "a"}]
        head = list(self._rendered(question))
        full = list(self._rendered([*question, {"role": "assistant", "content": text}], generation_prompt=False))
        special = set(self._tokenizer.all_special_ids)
        ends = [i for i, token in enumerate(full) if token in special]
        if full[: len(head)] != head or not ends or ends[-1] < len(head):
            raise DataError(
                "the model's chat template does not render an answer as the model would write it, so demonstrations "
                f"cannot be put into its tokens: leave them out (the answer was {text[:60]!r})."
            )
        return np.asarray(full[len(head) : ends[-1] + 1], dtype=np.int32)

    def follow_up(self, observation: str) -> IntArray:
        """Ids that come between two answers: from the end of the assistant's message to where its next one begins.

        They are what the template puts after a message's last token (its stop token, which the model wrote itself).

        Raises:
            DataError: the template refuses a second turn, or changes what came before it.
        """
        if not self.has_template:
            return np.asarray(
                self._tokenizer(f"\n\n{observation}\n\n", add_special_tokens=False)["input_ids"], dtype=np.int32
            )
        before: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        head = list(self._rendered(before, generation_prompt=False))
        full = list(self._rendered([*before, {"role": "user", "content": observation}]))
        special = set(self._tokenizer.all_special_ids)
        ends = [i for i, token in enumerate(head) if token in special]
        if full[: len(head)] != head or not ends:
            raise DataError(
                "the model's chat template renders earlier messages differently when a conversation goes on, so turns "
                "cannot be joined token by token: choose a model whose template neither drops nor changes them."
            )
        return np.asarray(full[ends[-1] + 1 :], dtype=np.int32)

    def decode(self, token_ids: IntArray) -> str:
        """The text, without special tokens, otherwise as the model wrote it."""
        return str(
            self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _rendered(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> Any:
        from jinja2 import TemplateError

        template: Any = self._tokenizer.apply_chat_template
        try:
            return template(
                [dict(message) for message in messages],
                add_generation_prompt=generation_prompt,
                tokenize=True,
                return_dict=False,
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"the model's chat template refuses a conversation of {roles}: {error}. Change the prompts "
                "(without `system_prompt`, for instance), or choose a model that takes them."
            ) from error
