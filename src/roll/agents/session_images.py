"""Stores the images in the requests of one session, within limits, because a model may have written the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roll.agents.request_errors import RequestError
from roll.envs.image_storage import MAX_IMAGES, ImageStorage
from roll.errors import DataError, WorkerDiedError
from roll.types import Content, ImageData, Message, Part, list_media

__all__ = ["SessionImages"]

MAX_DISTINCT_IMAGES = 4_096
"""Maximum number of different images that one session sends."""
MAX_STORED_BYTES = 512 * 2**20
"""Maximum total size of the different images that one session sends: they stay in the run's media store."""
_IMAGE_LABEL = "an image of the messages"


class SessionImages:
    """Stores the images of a session's requests.

    Args:
        storage: The run's storage.
        max_context: Longest context of the engines, in tokens.
    """

    def __init__(self, storage: ImageStorage, max_context: int) -> None:
        self._storage = storage
        self._max_context = max_context
        self._sent: set[str] = set()
        """Digests of the encoded images that were sent."""
        self._num_bytes = 0

    async def store(self, messages: Sequence[Message]) -> list[Message]:
        """Move the images of messages to the run's media store; return the messages with references to them.

        Raises:
            RequestError: There are too many images, or an image cannot be decoded.
        """
        count = sum(len(list_media(message.content)) for message in messages)
        if count > MAX_IMAGES:
            message = f"a request must not have more than {MAX_IMAGES} images, got {count}."
            raise RequestError(400, "context_length_exceeded", message, field="messages")
        stored: list[Message] = []
        num_tokens = 0
        for message in messages:
            content, num_own = await self._store_content(message.content, num_tokens)
            num_tokens += num_own
            stored.append(replace(message, content=content))
        return stored

    async def _store_content(self, content: Content, num_tokens: int) -> tuple[Content, int]:
        """Store the images of a message's content; return the new content and the number of tokens of its images.

        Args:
            content: The content.
            num_tokens: Number of tokens of the images in earlier messages of the request.
        """
        if isinstance(content, str):
            return content, 0
        parts: list[Part] = []
        num_own = 0
        for part in content:
            parts.append(await self._store_part(part))
            num_own += self._storage.count_tokens(parts[-1])
            # Before the next image is decoded: otherwise a request could keep the workers busy for an hour.
            if num_tokens + num_own > self._max_context:
                message = (
                    f"the images of the messages have more tokens than the model's context, {self._max_context}: send "
                    "fewer or smaller images."
                )
                raise RequestError(400, "context_length_exceeded", message, field="messages")
        return tuple(parts), num_own

    async def _store_part(self, part: Part) -> Part:
        if isinstance(part, ImageData) and part.digest not in self._sent:
            if len(self._sent) >= MAX_DISTINCT_IMAGES or self._num_bytes + len(part.data) > MAX_STORED_BYTES:
                message = (
                    f"this session must not send more than {MAX_DISTINCT_IMAGES} different images with "
                    f"{MAX_STORED_BYTES // 2**20} MiB in all."
                )
                raise RequestError(403, "budget_exhausted", message, field="messages")
            self._sent.add(part.digest)
            self._num_bytes += len(part.data)
        try:
            return await self._storage.store_part(part, _IMAGE_LABEL)
        except DataError as error:
            raise RequestError(400, "invalid_image", str(error), field="messages") from error
        except WorkerDiedError as error:
            message = f"{_IMAGE_LABEL} cannot be decoded: {error}"
            raise RequestError(400, "invalid_image", message, field="messages") from error
