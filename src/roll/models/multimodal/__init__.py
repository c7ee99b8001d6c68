"""Vision-language models: placeholder tokens, inputs of the vision tower, its features, and M-RoPE positions."""

from roll.models.multimodal.check import check_media
from roll.models.multimodal.features import get_base_model, has_media_tower
from roll.models.multimodal.inputs import MediaInputs, open_media
from roll.models.multimodal.model_media import ModelMedia
from roll.models.multimodal.processor import MediaProcessor, ProcessedMedia, has_media_config

__all__ = [
    "MediaInputs",
    "MediaProcessor",
    "ModelMedia",
    "ProcessedMedia",
    "check_media",
    "get_base_model",
    "has_media_config",
    "has_media_tower",
    "open_media",
]
