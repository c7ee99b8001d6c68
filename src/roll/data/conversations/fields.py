"""Fields of rows, messages and content parts that may be ignored; any other field that is not read is an error.

The tables in `docs/data-formats.md` list the same names; a test compares them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from roll.data.cells import BadRow, as_list, is_null
from roll.errors import shorten
from roll.registry import did_you_mean
from roll.types import MediaKind

__all__ = [
    "IGNORED_COLUMNS",
    "IGNORED_MESSAGE_FIELDS",
    "IGNORED_PART_FIELDS",
    "MEDIA_NAMES",
    "MEDIA_TYPES",
    "UnreadFields",
    "UnsupportedMedia",
    "is_empty",
    "is_media",
    "reject_unread",
]

_ID_COLUMNS = """
    id _id uid uuid guid idx index row_id example_id sample_id prompt_id question_id problem_id task_id instance_id
    conversation_id conv_id dialog_id dialogue_id thread_id session_id message_id hash __index_level_0__
"""
_ORIGIN_COLUMNS = """
    source sources source_dataset dataset dataset_name data_source subset split origin url urls link license created
    created_at updated_at timestamp date author annotator annotator_id annotators user_id model model_name generator
    generated_by teacher_model chosen_model rejected_model chosen-model rejected-model
"""
_SUBJECT_COLUMNS = """
    category categories subcategory topic topics subject domain field task task_type task_name type tag tags keywords
    ability language lang locale difficulty level quality
"""
_COUNT_COLUMNS = """
    num_turns num_tokens n_tokens token_count num_messages length score_chosen score_rejected chosen_score
    rejected_score chosen_rating rejected_rating
"""
_METADATA_COLUMNS = "metadata meta extra_info info extra"
IGNORED_COLUMNS = frozenset(
    " ".join((_ID_COLUMNS, _ORIGIN_COLUMNS, _SUBJECT_COLUMNS, _COUNT_COLUMNS, _METADATA_COLUMNS)).split()
)
"""Columns with IDs, descriptions or origins of rows, which do not change the question or the answer."""
_MESSAGE_FIELDS = "message_id uuid idx turn turn_id turn_identifier timestamp created created_at date model model_name"
IGNORED_MESSAGE_FIELDS = frozenset(f"id index source metadata cache_control {_MESSAGE_FIELDS}".split())
"""Fields of a message that do not change its content."""
IGNORED_PART_FIELDS = frozenset(("id", "index", "cache_control", "signature", "format"))
"""Fields of a content part, a tool call or a reasoning detail that do not change its content."""
MEDIA_TYPES: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("image", "images", "image_url", "input_image"),
    "audio": ("audio", "audios", "audio_url", "input_audio"),
    "video": ("video", "videos", "video_url"),
}
"""Columns, fields and types of content parts with media of each type."""
MEDIA_NAMES = frozenset((*(name for names in MEDIA_TYPES.values() for name in names), "file"))
"""Columns, fields and types of content parts with images, audio or video, which not every pipeline supports."""
TEXT_PIPELINES = frozenset(("reward_model",))
"""Pipelines that do not support images, audio and video."""


class UnsupportedMedia(BadRow):
    """The row has media that the run cannot read; the caller adds the cause.

    Args:
        reason: A short reason, which is the same for all rows with the same problem.
        part: The part with media, and its location.
        remedy: The remedy.
        cause: Why the run cannot read the media; empty if it is unknown.
    """

    def __init__(self, reason: str, part: str, remedy: str, cause: str = "") -> None:
        super().__init__(reason, f"{part}: {cause or 'images, audio and video are not supported here'}. {remedy}")
        self._found, self._remedy = part, remedy

    def with_cause(self, pipeline: str, *, reads_media: bool) -> UnsupportedMedia:
        """Return a copy of this error with its cause.

        Args:
            pipeline: The pipeline's name.
            reads_media: Whether the model of the run reads media.
        """
        if pipeline in TEXT_PIPELINES:
            cause = f"images, audio and video are not supported by pipeline '{pipeline}' yet"
        elif reads_media:
            cause = "media are read from the columns that `images_key`, `audios_key` and `videos_key` name"
        else:
            cause = "the model supports only text; images require a vision-language model"
        return UnsupportedMedia(self.reason, self._found, self._remedy, cause)


def is_media(value: Any) -> bool:
    """Return whether a value is an image, audio or video, or a list of them.

    Libraries store a medium as its file (`bytes`, `path`), audio as an `array` with its `sampling_rate`, and an open
    image as a PIL object.
    """
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if isinstance(value, Mapping):
        return value.keys() == {"bytes", "path"} or value.keys() >= {"array", "sampling_rate"}
    return type(value).__module__.startswith("PIL.")


def is_empty(value: Any) -> bool:
    """Return whether a value is null, an empty string or an empty container, which data sets use for missing values."""
    if is_null(value):
        return True
    value = as_list(value)
    return isinstance(value, str | list | tuple | dict) and not value


class UnreadFields:
    """The non-empty fields of a message or content part that have not been read yet.

    Args:
        value: All fields.
        ignored: Names of the fields that the configuration ignores.
    """

    def __init__(self, value: Mapping[Any, Any], ignored: Collection[str] = ()) -> None:
        self._left = {name: each for name, each in value.items() if name not in ignored and not is_empty(each)}

    @property
    def names(self) -> Collection[str]:
        """Names of the fields that have not been read yet."""
        return self._left.keys()

    def pop(self, name: str) -> Any:
        """Remove a field and return its value; `None` if it is empty or missing."""
        return as_list(self._left.pop(name, None))

    def check_all_read(self, ignored: Collection[str], known: Collection[str], label: str, location: str) -> None:
        """Check that all remaining fields may be ignored.

        Args:
            ignored: Names of fields that do not change the content.
            known: Names of fields that are read, to suggest the right name.
            label: The owner of the fields, for messages.
            location: Location of the owner, for messages.

        Raises:
            BadRow: A field was not read.
        """
        left = [name for name in self._left if name not in ignored]
        if left:
            reject_unread(left, f"field of {label}", known, location)


def reject_unread(
    names: list[Any], label: str, known: Collection[str], location: str, hint: str = "", *, media: bool = False
) -> NoReturn:
    """Raise an error about non-empty fields or columns that were not read.

    Args:
        names: Names of the fields or columns.
        label: The noun for the names in messages, such as "column".
        known: Names of fields that are read, to suggest the right name.
        location: Location of the fields, for messages.
        hint: A remedy, instead of a suggested name.
        media: Whether the fields contain media although their names do not indicate it.

    Raises:
        BadRow: Always.
    """
    listed = ", ".join(map(shorten, names[:10])) + (", …" if len(names) > 10 else "")
    if len(names) > 1:
        label = label.replace("field", "fields", 1).replace("column", "columns", 1)
    reason = f"unsupported {label}: {listed}"
    found = f"{location}: the {label} {listed} would be ignored, but may change the meaning of the row"
    remedy = "Remove it, or add its name to `ignored_fields`."
    if not hint and (media or any(name in MEDIA_NAMES for name in names)):
        raise UnsupportedMedia(reason, found, remedy)
    if not hint and names[0] in known:
        hint = " The row was read in another format, or this pipeline uses other columns."
    elif not hint and isinstance(names[0], str):
        hint = did_you_mean(names[0], [name for name in known if isinstance(name, str)])
    raise BadRow(reason, f"{found}.{hint} {remedy}")
