"""A rollout loop of one's own: the model looks at its answer once more before it counts.

rollout: {loop: examples/loops/second_try.py:second_try}
"""

import numpy as np

from roll.rollout.loops import Generate, Renderer, join_turns, next_turn
from roll.types import GenerationRequest, PromptDraw, Rollout, Turn

QUESTION = "Check your answer, then give it again."


async def second_try(
    draw: PromptDraw, index: int, first: GenerationRequest, generate: Generate, renderer: Renderer
) -> Rollout:
    """Two turns: an answer, and a second one after a question that is always the same."""
    answer = await generate(first)
    if answer.finish_reason != "stop":  # cut off: there is nothing to check
        return join_turns(draw, index, [answer], [], (), renderer)
    question = renderer.follow_up(QUESTION)
    context = np.concatenate([draw.token_ids, answer.token_ids, question]).astype(np.int32)
    second = await generate(next_turn(first, context, 1))
    begin = len(answer.token_ids) + len(question)
    turns = (Turn(start=0, end=len(answer.token_ids)), Turn(start=begin, end=begin + len(second.token_ids)))
    return join_turns(draw, index, [answer, second], [question], turns, renderer)
