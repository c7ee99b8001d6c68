"""A model whose every token follows from those before it, and a chat template of single characters.

So whoever holds a sequence can say of each token whether the engine would have written it there: `check_written`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import xxhash

from roll.data import build_samples
from roll.types import EncodedText, Generation, IntArray, Message, Rollout
from worlds.engines import Request, TickingEngine

__all__ = ["BEGIN", "END", "Characters", "WritingEngine", "check_written", "utterance"]

BEGIN, END = "\x02", "\x03"
ASSISTANT = f"{BEGIN}a"
TOKENS_PER_TICK = 12
VERSION = 1000
"""A log-prob says token and version: -(1000 * version + token), exact in float32."""
SAYINGS = (
    "go {n}",
    " go {n}  ",
    "<think>hm</think>go {n}",
    "go {n} and on and on and on and on and on and on and on",
    '<tool_call>{{"name":  "look", "arguments": {{"at": "{n}"}}}}</tool_call>',
    '<tool_call>{{"name":  "look", "arguments": {{"at": "{n}"}}}}</tool_call>',
    '<tool_call>{{"name": "python", "arguments": {{"code": "{n}"}}}}</tool_call>',
    '<tool_call>{{"name": "look", "arguments": {{"at": "{n}"}}}}</tool_call>'
    '<tool_call>{{"name": "find", "arguments": {{"at": "{n}"}}}}</tool_call>',
    "<tool_call>{{oops</tool_call>",
    "",
)


def utterance(context: str) -> str:
    """What the model answers to a context."""
    value = xxhash.xxh3_64_intdigest(context.encode())
    return SAYINGS[value % len(SAYINGS)].format(n=value // 64 % 10) + END


class Characters:
    """In place of `ChatRenderer`: a character is a token.

    Args:
        forgets: the template drops thinking from all answers but the last.
    """

    has_template, drops_tool_results, reasoning = True, False, None
    template = "tools <tool_call>"

    def __init__(self, *, forgets: bool) -> None:
        self.forgets = forgets

    def render_text(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        parts = [f"{BEGIN}s{len(tools)} tools{END}"] if tools else []
        for message in messages:
            content = message.text
            if self.forgets and message.role == "assistant":
                content = content.rpartition("</think>")[2]
            for call in message.tool_calls:
                content += f"<tool_call>{json.dumps(call['function'])}</tool_call>"
            parts.append(f"{BEGIN}{message.role[0]}{content}{END}")
        return "".join(parts) + ASSISTANT

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> IntArray:
        return self.tokenize_rendered(self.render_text(messages, tools))

    def tokenize_rendered(self, text: str) -> IntArray:
        return np.array([ord(letter) for letter in text], np.int32)

    def tokenize(self, text: str, *, first: bool = False) -> IntArray:
        return self.tokenize_rendered(text)

    def decode_raw(self, token_ids: IntArray) -> str:
        return "".join(map(chr, token_ids.tolist()))

    def decode_final_text(self, token_ids: IntArray, context: IntArray) -> str:
        return self.decode(token_ids)

    def decode(self, token_ids: IntArray) -> str:
        return self.escape_special_tokens(self.decode_raw(token_ids))

    def escape_special_tokens(self, text: str) -> str:
        return text.replace(BEGIN, "").replace(END, "")

    def parse_answer(self, answer: IntArray, context: IntArray, stops: Collection[int] = ()) -> tuple[str, bool]:
        text = self.decode_raw(answer)
        return text.removesuffix(END), text.endswith(END)

    def encode(self, text: str) -> EncodedText:
        return EncodedText(self.tokenize_rendered(text))

    def encode_suffix(self, text: str, has_end_token: bool) -> EncodedText | None:
        return EncodedText(self.tokenize_rendered(text)[has_end_token:]) if text.startswith(END) else None


class WritingEngine(TickingEngine):
    """Writes `utterance`, several tokens a tick, also where it goes on with what another one began."""

    def _tick(self, own: Request) -> None:
        if self._updating:
            self.violations.append(f"{self.engine_id} decodes while its weights change")
        self.num_ticks += 1
        due = len(self._left(own))
        most = min(due, own.request.sampling.max_new_tokens, len(own.versions) + TOKENS_PER_TICK)
        own.versions += [self.version] * (most - len(own.versions))
        if most >= due or most >= own.request.sampling.max_new_tokens:
            self._finish(own, "stop" if most >= due else "length")
        else:
            own.timer = asyncio.get_running_loop().call_later(self.tick_s, self._tick, own)

    @staticmethod
    def _left(own: Request) -> str:
        """What is still to be written behind the request's tokens."""
        head, mark, begun = "".join(map(chr, own.request.token_ids.tolist())).rpartition(ASSISTANT)
        return utterance(head + mark)[len(begun) :]

    def _finish(self, own: Request, reason: str) -> None:
        if not own.future.done():
            versions = np.array(own.versions, np.int32)
            token_ids = np.array([ord(letter) for letter in self._left(own)[: len(versions)]], np.int32)
            own.future.set_result(
                Generation(
                    request_id=own.request.request_id,
                    token_ids=token_ids,
                    logprobs=-(VERSION * versions + token_ids).astype(np.float32),
                    policy_versions=versions,
                    finish_reason=reason,  # type: ignore[arg-type]
                    engine_id=self.engine_id,
                )
            )
        self._leave(own)


def check_written(rollout: Rollout) -> None:
    """Each training sample is what an engine saw; the mask is over what it wrote there, with version and log-prob."""
    num_trained = 0
    for sample in build_samples(rollout):
        text = "".join(map(chr, sample.token_ids.tolist()))
        mask, versions = sample.loss_mask, sample.policy_versions
        begins = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
        for begin in begins.tolist():
            gaps = np.flatnonzero(~mask[begin:])
            end = begin + int(gaps[0]) if len(gaps) else len(mask)
            assert text[:begin].endswith(ASSISTANT), "what is trained does not begin where an answer does"
            assert utterance(text[:begin]).startswith(text[begin:end]), "no engine wrote what is trained"
            assert end == len(mask) or END in text[end - 1 : end + 1], "an answer goes on as somebody else's words"
        assert (versions[mask] >= 0).all() and (versions[~mask] == -1).all()
        expected = np.where(mask, -(VERSION * versions + sample.token_ids), 0).astype(np.float32)
        assert np.array_equal(sample.rollout_logprobs, expected), "log-probs are not those of these tokens"
        num_trained += int(mask.sum())
    assert num_trained == sum(turn.end - turn.start for turn in rollout.spans)
