"""Search: BM25 over a folder of text files, or a search server."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roll.envs.tools.base import ToolError
from roll.errors import ConfigError, InfraError
from roll.proxies import describe_proxy, make_client_session

__all__ = ["BM25", "FolderSearch", "HttpSearch", "Passage", "Search", "split_passages"]

K1, B = 1.2, 0.75
"""Saturation and length normalization, with Lucene's values (Robertson and Zaragoza, 2009)."""
WORDS_PER_PASSAGE = 150
MAX_QUERY_LENGTH = 1_000
_WORD_PATTERN = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A passage of a document."""

    title: str
    text: str


def _split_words(text: str) -> list[str]:
    return _WORD_PATTERN.findall(text.casefold())


class BM25:
    """A BM25 index: maps every word to the passages that contain it, with precomputed scores.

    A passage's score is the sum over the query's words w of idf(w) · f / (f + K1 (1 - B + B · length / mean length)),
    with f the frequency of w in the passage, and idf(w) = ln(1 + (N - n + 0.5) / (n + 0.5)), where n of N passages
    contain w.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = tuple(passages)
        counts = [Counter(_split_words(f"{passage.title} {passage.text}")) for passage in self.passages]
        lengths = np.array([count.total() for count in counts], np.float64)
        norms = K1 * (1 - B + B * lengths / max(lengths.mean(), 1.0)) if counts else lengths
        postings: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, count in enumerate(counts):
            for word, times in count.items():
                postings[word].append((number, times))
        self._postings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word, found in postings.items():
            numbers, times = np.array(found).T
            idf = math.log(1 + (len(counts) - len(found) + 0.5) / (len(found) + 0.5))
            self._postings[word] = numbers, idf * times / (times + norms[numbers])

    def search(self, query: str, num_results: int) -> list[Passage]:
        """Return the passages with the highest scores, best first; skip passages that share no word with the query."""
        scores = np.zeros(len(self.passages))
        for word in set(_split_words(query[:MAX_QUERY_LENGTH])):
            if word in self._postings:
                numbers, parts = self._postings[word]
                scores[numbers] += parts
        best = np.argsort(-scores, kind="stable")[:num_results]
        return [self.passages[number] for number in best if scores[number] > 0]


def split_passages(title: str, text: str) -> list[Passage]:
    """Split a document into passages of at most `WORDS_PER_PASSAGE` words."""
    words = text.split()
    pieces = range(0, len(words), WORDS_PER_PASSAGE)
    return [Passage(title=title, text=" ".join(words[start : start + WORDS_PER_PASSAGE])) for start in pieces]


class Search:
    """A `Tool` that searches an existing index.

    Args:
        index: The index of the passages.
        num_results: Number of passages per search.
        name: The tool's name.
    """

    description = "Searches documents for words and gives the passages that match best."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }

    def __init__(self, index: BM25, num_results: int = 3, name: str = "search") -> None:
        if num_results < 1:
            raise ValueError(f"num_results must be at least 1, got {num_results}")
        self._index, self._num_results, self.name = index, num_results, name

    def call(self, arguments: Mapping[str, Any], /) -> str:
        """See `Tool`."""
        return _format_passages(self._index.search(_get_query(arguments), self._num_results))


def _get_query(arguments: Mapping[str, Any]) -> str:
    query = arguments["query"].strip()
    if not query:
        raise ToolError("the query is empty")
    return query[:MAX_QUERY_LENGTH]


def _format_passages(passages: Sequence[Passage]) -> str:
    if not passages:
        return "Nothing was found."
    return "\n".join(f"[{number}] {passage.title}: {passage.text}" for number, passage in enumerate(passages, start=1))


class FolderSearch(Search):
    """A `Tool` that searches the `.txt` and `.md` files of a folder and its subfolders, read once per process."""

    def __init__(self, folder: str, num_results: int = 3, name: str = "search") -> None:
        super().__init__(_index_folder(str(Path(folder).expanduser().resolve())), num_results, name)


@functools.lru_cache(maxsize=8)
def _index_folder(folder: str) -> BM25:
    root = Path(folder)
    files = sorted(file for kind in ("*.txt", "*.md") for file in root.rglob(kind))
    if not files:
        raise ConfigError(f"tool 'search': the folder '{folder}' does not exist or has no .txt or .md files.")
    passages: list[Passage] = []
    for file in files:
        passages += split_passages(str(file.relative_to(root)), file.read_text(errors="replace"))
    return BM25(passages)


class HttpSearch:
    r"""A `Tool` that queries a server with the interface of Search-R1's retrieval server (which GEM's tool uses, too).

    It posts `{"queries": [query], "topk": n}`, and reads `{"result": [[{"document": {"contents": "title\ntext"}}]]}`.

    Args:
        url: The server's address.
        num_results: Number of passages per search.
        timeout_s: Timeout of a search.
        name: The tool's name.
    """

    description = Search.description
    parameters = Search.parameters

    def __init__(self, url: str, num_results: int = 3, timeout_s: float = 30.0, name: str = "search") -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must start with http:// or https://, got '{url}'")
        self._url, self._num_results, self._timeout_s, self.name = url, num_results, timeout_s, name

    async def check(self) -> None:
        """Send a test query before a run starts.

        Raises:
            InfraError: See `call`.
        """
        await self.call({"query": "test"})

    async def call(self, arguments: Mapping[str, Any], /) -> str:
        """See `Tool`.

        Raises:
            InfraError: The server cannot be reached, or its answer is malformed.
        """
        import aiohttp

        question = {"queries": [_get_query(arguments)], "topk": self._num_results}
        try:
            async with (
                make_client_session(self._url, timeout=aiohttp.ClientTimeout(total=self._timeout_s)) as session,
                session.post(self._url, json=question) as response,
            ):
                response.raise_for_status()
                answer = await response.json(content_type=None)
            documents = [entry.get("document", entry) for entry in answer["result"][0]]
            documents_read = [document["contents"].partition("\n") for document in documents[: self._num_results]]
        except TimeoutError as error:
            raise InfraError(f"search server {self._url} did not respond within {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise InfraError(f"search server {self._url} cannot be used: {what}{describe_proxy(self._url)}") from error
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
            form = '{"result": [[{"document": {"contents": …}}]]}'
            raise InfraError(f"search server {self._url} did not return {form}: {error!r}") from error
        return _format_passages([Passage(title=title.strip('"'), text=text) for title, _, text in documents_read])
