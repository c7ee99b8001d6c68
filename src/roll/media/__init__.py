"""Media of a run: decoding with size limits, and a store addressed by a digest of the decoded content."""

from roll.media.audio import AudioClip, AudioLimits, audio_from_array, decode_audio
from roll.media.images import (
    ImageLimits,
    compute_digest,
    decode_image,
    encode_thumbnail,
    image_from_array,
    read_image_size,
)
from roll.media.store import MediaContent, MediaStore, copy_store
from roll.media.video import VideoClip, VideoLimits, decode_video, video_from_frames

__all__ = [
    "AudioClip",
    "AudioLimits",
    "ImageLimits",
    "MediaContent",
    "MediaStore",
    "VideoClip",
    "VideoLimits",
    "audio_from_array",
    "compute_digest",
    "copy_store",
    "decode_audio",
    "decode_image",
    "decode_video",
    "encode_thumbnail",
    "image_from_array",
    "read_image_size",
    "video_from_frames",
]
