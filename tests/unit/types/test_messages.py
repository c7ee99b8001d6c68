"""Messages with typed parts: what they are as JSON, what tells them apart, and text that stays text."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data.source import PromptList, get_message_content, hash_question
from roll.errors import UnsupportedError
from roll.types import (
    AudioPart,
    Content,
    ImagePart,
    Message,
    Prompt,
    TextPart,
    VideoPart,
    describe_content,
    get_content_key,
    get_text,
    join_content,
    map_text,
    parse_content,
)

DIGESTS = st.binary(min_size=1, max_size=4).map(lambda data: hashlib.sha256(data).hexdigest())
GRIDS = st.none() | st.tuples(*[st.integers(1, 64)] * 3)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)
MEDIA = st.builds(
    lambda kind, digest, grid, source: kind(digest=digest, grid=grid, source=source),
    st.sampled_from([ImagePart, AudioPart, VideoPart]),
    DIGESTS,
    GRIDS,
    st.sampled_from(["", "pictures/a.png"]),
)
PARTS = st.lists(st.builds(lambda text: TextPart(text=text), TEXTS) | MEDIA, min_size=1, max_size=4)
CONTENTS: st.SearchStrategy[Content] = TEXTS | PARTS.map(parse_content)
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
MESSAGES = st.builds(
    lambda **fields: Message(**fields),
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=CONTENTS,
    reasoning=st.none() | TEXTS,
    tool_calls=st.sampled_from([(), (CALL,), (CALL, CALL)]),
    tool_call_id=st.none() | st.just("call00001"),
    name=st.none() | st.just("look"),
)
ONE, OTHER = (hashlib.sha256(name).hexdigest() for name in (b"one", b"other"))


@given(MESSAGES)
def test_messages_become_json_and_come_back(message: Message) -> None:
    again = Message.from_dict(json.loads(json.dumps(message.to_dict())))
    assert again == message == pickle.loads(pickle.dumps(message))
    assert [part.source for part in again.media] == [part.source for part in message.media]


@given(CONTENTS, CONTENTS)
def test_messages_contents_have_equal_keys_only_where_they_are_equal(one: Content, other: Content) -> None:
    assert (get_content_key(one) == get_content_key(other)) == (_flat(one) == _flat(other))


def _flat(content: Content) -> list[Any]:
    """Return a content with neighboring texts as one: parts that are cut elsewhere say the same."""
    found: list[Any] = []
    for part in (TextPart(text=content),) if isinstance(content, str) else content:
        if isinstance(part, TextPart):
            found += [] if not part.text else [part.text]
            if len(found) > 1 and isinstance(found[-2], str) and part.text:
                found[-2:] = [found[-2] + found[-1]]
        else:
            found.append(part)
    return found


@given(TEXTS)
def test_messages_a_content_without_media_is_the_text_itself(text: str) -> None:
    assert (
        parse_content(text) is text
        and get_content_key(text) is text
        and get_text(text) is text
        and describe_content(text) is text
    )
    assert parse_content([{"type": "text", "text": text}, TextPart(text="!")]) == f"{text}!"
    message = Message(role="user", content=text)
    assert message.text is text and message.media == ()
    assert message.to_dict() == {"role": "user", "content": text}


def test_messages_parts_of_other_kinds_are_never_equal() -> None:
    image, audio, video = (part(digest=ONE) for part in (ImagePart, AudioPart, VideoPart))
    assert len({image, audio, video, ImagePart(digest=OTHER), ImagePart(digest=ONE, grid=(1, 2, 2))}) == 5
    assert image == ImagePart(digest=ONE, source="elsewhere.png")  # one content, wherever it was read
    assert len({get_content_key((part,)) for part in (image, audio, video)}) == 3


@pytest.mark.parametrize("digest", ["", "0X12", "ABCDEF", "g0", "../a.png", 7, "0" * 10_000])
def test_messages_a_digest_that_is_no_hexadecimal_is_refused(digest: Any) -> None:
    with pytest.raises(ValueError, match="must be lowercase hexadecimal"):
        ImagePart(digest=digest)


@pytest.mark.parametrize(
    "value", [None, 3, [3], [{"type": "image"}], [{"type": "smell", "digest": "00"}], [{"type": "text"}], [{}], [[]]]
)
def test_messages_what_is_no_content_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="content"):
        parse_content(value)


@pytest.mark.parametrize(
    "fields",
    [
        *({"grid": grid} for grid in (3, "333", [1, 2], [1, 2, 3, 4], [1, 2, float("inf")], [0, 1, 1], [10**30, 1, 1])),
        *({"source": source} for source in (3, ["a.png"])),
    ],
)
def test_messages_a_part_of_media_with_fields_of_other_types_is_refused_as_no_content(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"the (grid|source) of a part of type 'image' must be .*, got") as caught:
        parse_content([{"type": "image", "digest": ONE, **fields}])
    assert len(str(caught.value)) < 200


def test_messages_code_that_knows_texts_alone_refuses_media_by_kind_and_source() -> None:
    message = Message(role="user", content=(TextPart(text="Look: "), ImagePart(digest=ONE, source="rows.jsonl:3")))
    with pytest.raises(UnsupportedError, match=r"'image' \(from rows.jsonl:3\), but only text is supported"):
        _ = message.text
    assert describe_content(message.content) == f"Look: [image {ONE[:12]}]"


def test_messages_contents_are_joined_and_changed_around_their_media() -> None:
    image = ImagePart(digest=ONE)
    assert join_content(["a", "b"]) == "a\n\nb"
    joined = join_content(["a", (image, TextPart(text="b"))], " ")
    assert joined == (TextPart(text="a"), TextPart(text=" "), image, TextPart(text="b"))
    assert map_text(joined, str.upper) == (TextPart(text="A"), TextPart(text=" "), image, TextPart(text="B"))
    assert map_text("a", str.upper) == "A"


def test_messages_fingerprints_and_held_out_splits_tell_pictures_apart() -> None:
    def prompt(*content: Any) -> Prompt:
        return Prompt(uid="d/1", domain="d", messages=(Message(role="user", content=parse_content(list(content))),))

    text = TextPart(text="What is it?")
    prompts = [prompt(text, *media) for media in ([], [ImagePart(digest=ONE)], [ImagePart(digest=OTHER)])]
    prompts.append(prompt(ImagePart(digest=ONE), text))
    assert len({PromptList([one]).fingerprint for one in prompts}) == 4
    assert len({hash_question(map(get_message_content, one.messages)) for one in prompts}) == 4
    same = prompt(text, ImagePart(digest=ONE, source="a copy.png"))
    assert PromptList([same]).fingerprint == PromptList([prompts[1]]).fingerprint


def test_messages_fingerprints_of_texts_are_what_they_were() -> None:
    """A run of an earlier version goes on: its checkpoint has the fingerprints of then."""
    called = Message(role="assistant", content="so", tool_calls=(CALL,), name="x")
    assert get_message_content(Message(role="user", content="3 + 4")) == "user\x003 + 4"
    assert get_message_content(called) == (
        'assistant\x00so\x00{"name": "x", "tool_calls": [{"function": {"arguments": {"at": 1}, "name": "look"}, '
        '"type": "function"}]}'
    )
    assert get_message_content(replace(called, tool_calls=(), name=None, reasoning="r")) == (
        'assistant\x00so\x00{"reasoning_content": "r"}'
    )
