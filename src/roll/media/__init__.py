"""Images, audio and video of a run: decoding with size limits, and a content-addressed store."""

from roll.media.audio import AudioClip, AudioLimits, convert_array_to_audio, decode_audio
from roll.media.images import (
    ImageLimits,
    compute_digest,
    convert_array_to_image,
    convert_pillow_to_image,
    decode_image,
    encode_thumbnail,
    read_image_size,
)
from roll.media.store import DECODER, Decoder, MediaContent, MediaStore, copy_store, decode_medium
from roll.media.video import VideoClip, VideoLimits, build_video, decode_video

__all__ = [
    "DECODER",
    "AudioClip",
    "AudioLimits",
    "Decoder",
    "ImageLimits",
    "MediaContent",
    "MediaStore",
    "VideoClip",
    "VideoLimits",
    "build_video",
    "compute_digest",
    "convert_array_to_audio",
    "convert_array_to_image",
    "convert_pillow_to_image",
    "copy_store",
    "decode_audio",
    "decode_image",
    "decode_medium",
    "decode_video",
    "encode_thumbnail",
    "read_image_size",
]
