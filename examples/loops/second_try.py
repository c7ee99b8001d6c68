"""A custom rollout loop: the model is asked to check its answer, and its second answer is scored.

rollout: {loop: examples/loops/second_try.py:second_try}
"""

import numpy as np

from roll.rollout.loops import Generate, Renderer, build_next_request, join_turns
from roll.types import GenerationRequest, PromptDraw, Rollout, Turn

QUESTION = "Check your answer, then give it again."


async def second_try(
    draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Generate, renderer: Renderer
) -> Rollout:
    """Return a rollout of two turns: an answer, and a second answer after a fixed question."""
    answer = await generate(first_request)
    if answer.finish_reason != "stop":  # a truncated answer cannot be checked
        return join_turns(draw, index, [answer], [], (), renderer)
    question = renderer.tokenize_follow_up(QUESTION)
    context = np.concatenate([draw.token_ids, answer.token_ids, question]).astype(np.int32)
    second = await generate(build_next_request(first_request, context, 1))
    begin = len(answer.token_ids) + len(question)
    turns = (Turn(start=0, end=len(answer.token_ids)), Turn(start=begin, end=begin + len(second.token_ids)))
    return join_turns(draw, index, [answer, second], [question], turns, renderer)
