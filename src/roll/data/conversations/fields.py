"""Which fields of rows, messages and content parts may be left unread; every other field is read or refused by name.

The tables of `docs/examples.md` list the same names; a test compares them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from roll.data.cells import BadRow, as_list, is_null
from roll.errors import short
from roll.registry import nearest

__all__ = [
    "IGNORED_COLUMNS",
    "IGNORED_MESSAGE_FIELDS",
    "IGNORED_PART_FIELDS",
    "MEDIA",
    "Fields",
    "UnconsumedMedia",
    "holds_media",
    "refuse_unread",
    "says_nothing",
]

_NAMES = """
    id _id uid uuid guid idx index row_id example_id sample_id prompt_id question_id problem_id task_id instance_id
    conversation_id conv_id dialog_id dialogue_id thread_id session_id message_id hash __index_level_0__
"""
_ORIGINS = """
    source sources source_dataset dataset dataset_name data_source subset split origin url urls link license created
    created_at updated_at timestamp date author annotator annotator_id annotators user_id model model_name generator
    generated_by teacher_model chosen_model rejected_model chosen-model rejected-model
"""
_SUBJECTS = """
    category categories subcategory topic topics subject domain field task task_type task_name type tag tags keywords
    ability language lang locale difficulty level quality
"""
_COUNTS = """
    num_turns num_tokens n_tokens token_count num_messages length score_chosen score_rejected chosen_score
    rejected_score chosen_rating rejected_rating
"""
_KEPT = "metadata meta extra_info info extra"
IGNORED_COLUMNS = frozenset(" ".join((_NAMES, _ORIGINS, _SUBJECTS, _COUNTS, _KEPT)).split())
"""Columns that name a row, say where it comes from, or describe it: they do not change what is asked and answered."""
_OF_MESSAGES = "message_id uuid idx turn turn_id turn_identifier timestamp created created_at date model model_name"
IGNORED_MESSAGE_FIELDS = frozenset(f"id index source metadata cache_control {_OF_MESSAGES}".split())
"""Fields of a message that do not change what it says."""
IGNORED_PART_FIELDS = frozenset(("id", "index", "cache_control", "signature", "format"))
"""Fields of a content part, a tool's call or a reasoning detail that do not change what it says."""
_PICTURES = ("image", "images", "image_url", "input_image")
_FILMS = ("video", "videos", "video_url")
MEDIA = frozenset((*_PICTURES, *_FILMS, "audio", "audios", "input_audio", "file"))
"""Columns, fields and types of content parts that hold pictures, sound or films, which no pipeline consumes yet."""


class UnconsumedMedia(BadRow):
    """A row with pictures, sound or films, which the pipeline does not consume; who reads rows for one names it.

    Args:
        reason: see `BadRow`.
        found: what has them, and where.
        mend: what to do.
        pipeline: its name; empty where it is not known.
    """

    def __init__(self, reason: str, found: str, mend: str, pipeline: str = "") -> None:
        by = f"pipeline '{pipeline}'" if pipeline else "this pipeline"
        super().__init__(reason, f"{found}: pictures, sound and films are not consumed by {by} yet. {mend}")
        self._found, self._mend = found, mend

    def by(self, pipeline: str) -> UnconsumedMedia:
        """Return the same error with the pipeline's name."""
        return UnconsumedMedia(self.reason, self._found, self._mend, pipeline)


def holds_media(value: Any) -> bool:
    """Return whether a column's value is a picture, a sound or a film, or a list of them, whatever the column's name.

    Libraries keep one as its file (`bytes`, `path`), a sound as an `array` with its `sampling_rate`, and an opened
    picture as an object of PIL.
    """
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if isinstance(value, Mapping):
        return value.keys() == {"bytes", "path"} or value.keys() >= {"array", "sampling_rate"}
    return type(value).__module__.startswith("PIL.")


def says_nothing(value: Any) -> bool:
    """Return whether a value is null, or an empty text or container, as data sets fill what a row does not have."""
    if is_null(value):
        return True
    value = as_list(value)
    return isinstance(value, str | list | tuple | dict) and not value


class Fields:
    """The fields of a message or of a part of one that say anything, to be taken one after the other.

    Args:
        value: all fields.
        ignored: names of those that the configuration leaves unread.
    """

    def __init__(self, value: Mapping[Any, Any], ignored: Collection[str] = ()) -> None:
        self._left = {name: said for name, said in value.items() if name not in ignored and not says_nothing(said)}

    @property
    def names(self) -> Collection[str]:
        """Names of the fields that were not taken yet."""
        return self._left.keys()

    def take(self, name: str) -> Any:
        """Return a field's value, `None` where it says nothing; it is read then."""
        return as_list(self._left.pop(name, None))

    def check_all_read(self, ignored: Collection[str], known: Collection[str], what: str, where: str) -> None:
        """Check that no field is left but those that may be.

        Args:
            ignored: names of fields that do not change what is said.
            known: names of fields that are read, to find the one that was meant.
            what: what has the fields, for messages.
            where: its place, for messages.

        Raises:
            BadRow: one is left.
        """
        left = [name for name in self._left if name not in ignored]
        if left:
            refuse_unread(left, f"field of {what}", known, where)


def refuse_unread(
    names: list[Any], what: str, known: Collection[str], where: str, hint: str = "", *, media: bool = False
) -> NoReturn:
    """Refuse fields or columns that are not read.

    Args:
        names: of them.
        what: they are.
        known: names of those that are read, to find the one that was meant.
        where: their place, for messages.
        hint: in place of a name that was meant.
        media: they hold pictures, sound or films, whatever their names.

    Raises:
        BadRow: always.
    """
    listed = ", ".join(map(short, names[:10])) + (", …" if len(names) > 10 else "")
    if len(names) > 1:
        what = what.replace("field", "fields", 1).replace("column", "columns", 1)
    reason = f"unread {what}: {listed}"
    found = f"{where}: the {what} {listed} would not be read, and may change what the row means"
    mend = "Remove it, or name it in `ignored_fields` to leave it unread."
    if not hint and (media or any(name in MEDIA for name in names)):
        raise UnconsumedMedia(reason, found, mend)
    if not hint and names[0] in known:
        hint = " Another form of the row was read, or this pipeline learns from other columns."
    elif not hint and isinstance(names[0], str):
        hint = nearest(names[0], [name for name in known if isinstance(name, str)])
    raise BadRow(reason, f"{found}.{hint} {mend}")
