"""Converts directories of sandboxes to tar archives and back.

The server never unpacks an archive: it checks the archive, and a program in the sandbox unpacks it without privileges.
Archives from a sandbox are also checked, since a malicious program may have written them.
"""

from __future__ import annotations

import asyncio
import io
import tarfile

from roll_sandbox.agent_sandbox import Sandbox
from roll_sandbox.errors import OversizedUploadError, SandboxPathError, SandboxRequestError
from roll_sandbox.tar_headers import BoundedTarInfo
from roll_sandbox.types import PythonCode

__all__ = ["check_archive", "pack", "unpack"]

MAX_BYTES = 2**26
_TIMEOUT_S = 60.0
_PACK_PROGRAM = """
import os, sys, tarfile
root = sys.argv[1]
os.scandir(root).close()
plain = lambda member: member if member.isreg() or member.isdir() else None
with os.fdopen(1, "wb", closefd=False) as sink, tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as out:
    for name in sorted(os.listdir(root)):
        out.add(os.path.join(root, name), name, filter=plain)
"""
_UNPACK_PROGRAM = """
import os, sys, tarfile
os.makedirs(sys.argv[1], exist_ok=True)
with os.fdopen(0, "rb", closefd=False) as source, tarfile.open(fileobj=source, mode="r:") as archive:
    archive.extractall(sys.argv[1], filter="data")
"""


async def pack(sandbox: Sandbox, path: str) -> bytes:
    """Return a tar archive of the files and directories below `path` in the sandbox, without links and devices.

    Raises:
        SandboxPathError: the directory cannot be read.
        OversizedUploadError: the archive from the sandbox has too many or too large files.
        SandboxRequestError: the sandbox did not return a valid tar archive of files and directories.
    """
    program = PythonCode(source=_PACK_PROGRAM, argv=(path,), wall_s=_TIMEOUT_S, output_bytes=MAX_BYTES)
    result = await sandbox.execute(program)
    if not result.ok:
        raise SandboxPathError(5, f"in the sandbox: {_get_last_line(result.stderr) or result.outcome}", path)
    limits = sandbox.spec.limits
    await asyncio.to_thread(check_archive, result.stdout, limits.disk_bytes * 2, limits.max_files * 2)
    return result.stdout


async def unpack(sandbox: Sandbox, path: str, archive: bytes) -> None:
    """Unpack a tar archive below `path` in the sandbox; create the directory if it does not exist.

    Raises:
        OversizedUploadError: the archive does not fit into the sandbox.
        SandboxPathError: the directory cannot be written.
        SandboxRequestError: `archive` is not an uncompressed tar archive, or has a member that is not allowed.
    """
    limits = sandbox.spec.limits
    await asyncio.to_thread(check_archive, archive, limits.disk_bytes, limits.max_files)
    result = await sandbox.execute(PythonCode(source=_UNPACK_PROGRAM, argv=(path,), stdin=archive, wall_s=_TIMEOUT_S))
    if not result.ok:
        raise SandboxPathError(5, f"in the sandbox: {_get_last_line(result.stderr) or result.outcome}", path)


def check_archive(data: bytes, max_bytes: int, max_files: int) -> None:
    """Check that an archive is uncompressed tar, and has only files and directories with paths below the target.

    Raises:
        OversizedUploadError: the archive has too many or too large files.
        SandboxRequestError: `data` is not an uncompressed tar archive, or has a member that is not allowed.
    """
    count = size = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:", tarinfo=BoundedTarInfo) as archive:
            for member in archive:
                archive.members = []  # pyrefly: ignore[missing-attribute]  # tarfile would keep them all
                count, size = count + 1, size + max(0, member.size)
                if count > max_files or size > max_bytes:
                    raise OversizedUploadError(
                        f"an archive must not exceed {max_files:,} files and {max_bytes:,} bytes: send less, or "
                        "increase the sandbox's disk_bytes and max_files."
                    )
                _check_member(member)
    except (OversizedUploadError, SandboxRequestError):  # also ValueErrors
        raise
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
        raise SandboxRequestError(f"the body must be an uncompressed tar archive ({str(error)[:100]}).") from None


def _check_member(member: tarfile.TarInfo) -> None:
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise SandboxRequestError(f"the archive's entry {member.name[:200]!r} is neither a file nor a directory.")
    if "\0" in member.name or member.size < 0:
        raise SandboxRequestError(f"the archive's entry {member.name[:200]!r} has an invalid name or size.")
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise SandboxRequestError(f"the archive's entry {member.name[:200]!r} is outside the target directory.")


def _get_last_line(stderr: bytes) -> str:
    return stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
