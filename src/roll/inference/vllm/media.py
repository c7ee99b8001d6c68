"""Builds prompts with media for vLLM, whose processor expands the placeholder of each medium."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from roll.errors import InfraError, UnsupportedError
from roll.inference.spec import reject_media
from roll.media import AudioClip, VideoClip
from roll.models.multimodal import MediaInputs
from roll.running import run_in_thread
from roll.types import IntArray, MediaSpan

__all__ = ["build_prompt", "check_expanded"]


async def build_prompt(
    llm: Any,
    convert_errors: Callable[[Any], Awaitable[Any]],
    inputs: MediaInputs | None,
    token_ids: IntArray,
    media: Sequence[MediaSpan],
) -> Any:
    """Return a prompt for vLLM.

    Args:
        llm: The client of vLLM.
        convert_errors: A function that awaits a call to vLLM and converts its errors.
        inputs: The media of the run; `None` for a model that reads only text.
        token_ids: Tokens [L] of the sequence, with media expanded.
        media: The spans of media in the tokens.

    Raises:
        UnsupportedError: The sequence has media but the model reads only text, or its videos have different frame
            rates.
        DataError: A medium is not in the run's store.
    """
    from vllm.inputs.engine import tokens_input

    if not media:
        return tokens_input(token_ids.tolist())
    if inputs is None:
        reject_media("vllm", media)
    assert inputs is not None
    data, settings = await run_in_thread(_load_media, inputs, media)
    # Collapsed to placeholders: vLLM would expand already expanded tokens a second time.
    tokens = inputs.processor.collapse(token_ids, media)
    prompt = {"prompt_token_ids": tokens.tolist(), "multi_modal_data": data, "mm_processor_kwargs": settings}
    (rendered,) = await convert_errors(llm.renderer.render_cmpl_async([prompt]))
    return rendered


def _load_media(inputs: MediaInputs, media: Sequence[MediaSpan]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Return the media of a sequence by kind, and the arguments of vLLM's processor.

    Raises:
        UnsupportedError: Videos have different frame rates, but vLLM computes all timestamps from one rate, or audio
            clips that must be padded together have different lengths.
    """
    data: dict[str, list[Any]] = {}
    rates: dict[float, None] = {}
    for span in media:
        content: Any = inputs.store.get(span.digest)
        if isinstance(content, AudioClip):
            content = content.samples, content.rate
        elif isinstance(content, VideoClip):
            _check_positions(inputs, span)
            content, fps = inputs.processor.sample_video(content)
            rates[fps] = None
        data.setdefault(span.kind, []).append(content)
    lengths = {len(samples) for samples, _ in data.get("audio", ())}
    if len(lengths) > 1 and inputs.processor.pads_audio_together:
        raise UnsupportedError(
            "a sequence has audio clips of different lengths. vLLM pads them before it computes their features, so the "
            "ends of the shorter ones would differ from the trainer's: use the engine 'hf', or clips of equal length."
        )
    if len(rates) > 1:
        raise UnsupportedError(
            f"a sequence has videos that the model sees at {', '.join(f'{fps:g}' for fps in rates)} frames per "
            "second, but vLLM supports only one rate per sequence: use the engine 'hf', or videos with identical "
            "frame rates."
        )
    return data, {"fps": next(iter(rates)), "do_sample_frames": False} if rates else {}


def _check_positions(inputs: MediaInputs, span: MediaSpan) -> None:
    """Check that vLLM computes the positions of a video as the trainer does.

    Raises:
        UnsupportedError: The frames have fractional positions, which vLLM does not support.
    """
    processed = inputs.get_without_inputs(span.digest)
    if inputs.processor.has_fractional_positions(processed):
        raise UnsupportedError(
            f"video {span.digest[:12]} has {processed.seconds_per_grid:g} s between pairs of frames. The model gives "
            "them fractional positions, which vLLM rounds: use the engine 'hf', or videos of at least 2 s "
            "with at least 2 frames per second."
        )


def check_expanded(expanded: Sequence[int] | None, token_ids: IntArray, label: str) -> None:
    """Check that vLLM expanded the media to the same tokens as the trainer.

    Args:
        expanded: The prompt's tokens in vLLM's output.
        token_ids: The prompt's tokens in the request.
        label: Name of the request in error messages.

    Raises:
        InfraError: The tokens differ.
    """
    if list(expanded or ()) != token_ids.tolist():
        raise InfraError(
            f"{label}: vLLM and the trainer expand the media to different tokens ({len(expanded or ())} and "
            f"{len(token_ids)} prompt tokens): the settings of vLLM's processor differ from the model's files."
        )
