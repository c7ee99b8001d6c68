"""Bounds the headers of untrusted archives before `tarfile` parses them.

`tarfile` parses numbers in extended headers in quadratic time (CVE-2024-6232, before Python 3.12.6 and 3.11.10), reads
chains of headers recursively, copies global headers into every member, and reads the whole map of a sparse file into
memory.
"""

from __future__ import annotations

import re
import tarfile
from typing import Any

__all__ = ["BoundedTarInfo"]

_CHECKSUM = slice(148, 156)
_MAX_BYTES = 2**17
_MAX_CHAINED_HEADERS = 8
_MAX_GLOBAL_HEADERS = 64
_MAX_PIECES = 2**12
"""Maximum number of pieces of a sparse file."""
_LONG_NUMBER_PATTERN = re.compile(rb"[0-9]{64}")
_PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENSION_TYPES = (*_PAX_TYPES, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class BoundedTarInfo(tarfile.TarInfo):
    """A `TarInfo` that checks the bounds of headers while reading, for `tarfile.open(..., tarinfo=BoundedTarInfo)`.

    The file must support seeking back over its last read. A header that exceeds a bound raises `tarfile.ReadError`.
    """

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        """Create a member from a block of 512 bytes.

        Raises:
            tarfile.HeaderError: the block is not a header. `tarfile` reads an empty checksum field as 0, and one in 256
                blocks of compressed data has this signed sum, so this method refuses an empty field.
        """
        if buf.strip(b"\0") and not buf[_CHECKSUM].strip(b"\0 "):
            raise tarfile.InvalidHeaderError("missing checksum")  # type: ignore[attr-defined]
        return super().frombuf(buf, encoding, errors)

    def _proc_member(self, tarfile: Any) -> Any:
        chained = getattr(tarfile, "chained_headers", 0)
        if chained == _MAX_CHAINED_HEADERS or len(tarfile.pax_headers) > _MAX_GLOBAL_HEADERS:
            raise _make_header_error("an entry or the archive has too many extended headers")
        if self.type not in _EXTENSION_TYPES:
            return super()._proc_member(tarfile)  # type: ignore[misc]
        if not 0 <= self.size <= _MAX_BYTES:
            raise _make_header_error(f"a header has {self.size:,} bytes, more than {_MAX_BYTES:,}")
        if self.type in _PAX_TYPES and _LONG_NUMBER_PATTERN.search(_peek(tarfile.fileobj, self.size)):
            raise _make_header_error("a header has a number of 64 digits or more")
        tarfile.chained_headers = chained + 1
        try:
            return super()._proc_member(tarfile)  # type: ignore[misc]
        finally:
            tarfile.chained_headers = chained

    def _proc_sparse(self, tarfile: Any) -> Any:
        if self._sparse_structs[1]:  # type: ignore[attr-defined]
            raise _make_header_error("a sparse file has an invalid map, or too many pieces")
        return super()._proc_sparse(tarfile)  # type: ignore[misc]

    def _proc_gnusparse_10(self, next: Any, pax_headers: Any, tarfile: Any) -> None:
        number = _peek(tarfile.fileobj, 512).partition(b"\n")[0]
        if not number.isdigit() or len(number) > 9 or int(number) > _MAX_PIECES:
            raise _make_header_error("a sparse file has an invalid map, or too many pieces")
        super()._proc_gnusparse_10(next, pax_headers, tarfile)  # type: ignore[misc]


def _peek(file: Any, size: int) -> bytes:
    start = file.tell()
    data: bytes = file.read(size)
    file.seek(start)
    return data


def _make_header_error(message: str) -> tarfile.TarError:
    return tarfile.ReadError(message)
