"""Renders prompts, optionally with the start of an answer (prefill), to the engine's input tokens."""

from __future__ import annotations

import re

from roll.data.cells import BadRow
from roll.data.chat import ChatRenderer
from roll.data.media import hint_at_missing_media
from roll.data.source import get_message_texts, get_tool_texts
from roll.data.templates import PROBE_TEXT
from roll.types import EncodedText, Message, Prompt

__all__ = ["tokenize_prompt"]

_OPENED_TAG_PATTERN = re.compile(r"<[^<>\s]+>\s*\Z")


def tokenize_prompt(prompt: Prompt, renderer: ChatRenderer) -> EncodedText:
    """Tokenize a prompt, up to the position where the model's answer starts or continues.

    Text that is already rendered is not rendered again. If the last message is the assistant's, its text follows the
    generation prompt, and the model continues it.

    Args:
        prompt: The prompt; with an environment, its messages are rendered unchanged.
        renderer: The model's renderer.

    Raises:
        BadRow: A message contains a special token, which the model would confuse with the template's tokens.
        DataError: The template rejects the conversation, or leaves out a part of it.
    """
    if prompt.environment is not None:
        return renderer.encode(renderer.render_text(prompt.messages, prompt.tools))
    if prompt.text is not None and _is_rendered(prompt.text, renderer):
        return EncodedText(renderer.tokenize(prompt.text, add_special_tokens=True))
    if renderer.has_template:
        _check_special_tokens(prompt, renderer)
    renderer.check_fully_rendered(prompt.input_messages, prompt.tools, prompt.template_kwargs)
    text = renderer.render_text(prompt.input_messages, prompt.tools, prompt.template_kwargs)
    return renderer.encode(_append_prefill(text, prompt.prefill))


def _is_rendered(text: str, renderer: ChatRenderer) -> bool:
    """Return whether a text is already rendered: it starts with a special token, and has the template's headers."""
    if not renderer.has_template:
        return True
    found = renderer.find_special_token(text)
    if found is None or not text.lstrip().startswith(found):
        return False
    _, _, between = renderer.render_text([Message(role="user", content=PROBE_TEXT)]).partition(PROBE_TEXT)
    return between.strip() in text


def _check_special_tokens(prompt: Prompt, renderer: ChatRenderer) -> None:
    texts = [text for message in prompt.input_messages for text in get_message_texts(message)]
    found = next(filter(None, map(renderer.find_special_token, [*texts, *get_tool_texts(prompt.tools)])), None)
    if found is None and renderer.escape_special_tokens(prompt.prefill) != prompt.prefill:
        found = renderer.find_special_token(prompt.prefill) or prompt.prefill[:60]
    if found is not None:
        raise BadRow(
            "special token in a message",
            f"prompt '{prompt.uid}' contains {found!r}, a special token of the chat template: remove it, or provide "
            "the whole prompt as the template renders it, up to the start of the answer."
            + hint_at_missing_media(found),
        )


def _append_prefill(head: str, prefill: str) -> str:
    r"""Append the start of the answer to a rendered prompt; a tag such as `<think>` that both contain is kept once.

    >>> _append_prefill("<|im_start|>assistant\n<think>\n", "<think>Let me")
    '<|im_start|>assistant\n<think>Let me'
    """
    # Templates of reasoning models end the generation prompt with `<think>`, which a row's prefill may begin with too.
    found = _OPENED_TAG_PATTERN.search(head)
    if found and prefill.lstrip().startswith(found[0].strip()):
        return head[: found.start()] + prefill.lstrip()
    return head + prefill
