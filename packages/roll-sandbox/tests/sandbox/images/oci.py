"""Images to test with: archives of layers, layouts, what `docker save` writes, and a root with a few real programs."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
PROGRAMS = ("sh", "cat", "ls", "id", "mkdir", "rm", "dd", "stat", "readlink")
Entry = tuple[tarfile.TarInfo, bytes]


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def file(name: str, data: bytes = b"", mode: int = 0o644) -> Entry:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    return info, data


def entry(name: str, kind: bytes = tarfile.DIRTYPE, link: str = "", mode: int = 0o755) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info, b""


def symlink(name: str, target: str) -> Entry:
    return entry(name, tarfile.SYMTYPE, target)


def hardlink(name: str, target: str) -> Entry:
    return entry(name, tarfile.LNKTYPE, target)


def archive(entries: Iterable[Entry], format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as written:
        for info, data in entries:
            written.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@dataclass(frozen=True)
class Built:
    """An image as its pieces, by digest."""

    blobs: Mapping[str, bytes]
    manifest: str
    config: str
    layers: tuple[str, ...]
    """Of the archives, unpacked."""


def build(layers: Iterable[Iterable[Entry]], packed: bool = True, **config: Any) -> Built:
    """An image of these layers, the lowest first."""
    archives = [archive(each) for each in layers]
    blobs = [gzip.compress(each, 1, mtime=0) if packed else each for each in archives]
    diffs = [digest_of(each) for each in archives]
    said = {"architecture": MACHINE, "os": "linux", "config": config, "rootfs": {"type": "layers", "diff_ids": diffs}}
    text = json.dumps(said).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": digest_of(text),
            "size": len(text),
        },
        "layers": [
            {
                "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                "digest": digest_of(blob),
                "size": len(blob),
            }
            for blob in blobs
        ],
    }
    body = json.dumps(manifest).encode()
    found = {digest_of(each): each for each in (text, body, *blobs)}
    return Built(found, digest_of(body), digest_of(text), tuple(diffs))


def index_of(built: Built, tag: str, nested: bool = False) -> tuple[dict[str, Any], dict[str, bytes]]:
    """An index that names it, and further blobs that it needs."""
    entry = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": built.manifest, "size": 1}
    if nested:
        other = {**entry, "digest": digest_of(b"other"), "platform": {"os": "linux", "architecture": "mips"}}
        inner = {"manifests": [other, {**entry, "platform": {"os": "linux", "architecture": MACHINE}}]}
        body = json.dumps(inner).encode()
        entry = {"mediaType": "application/vnd.oci.image.index.v1+json", "digest": digest_of(body), "size": len(body)}
        return {"manifests": [{**entry, "annotations": {"org.opencontainers.image.ref.name": tag}}]}, {
            entry["digest"]: body
        }
    return {"manifests": [{**entry, "annotations": {"org.opencontainers.image.ref.name": tag}}]}, {}


def write_layout(path: Path, built: Built, tag: str = "latest", nested: bool = False) -> Path:
    index, further = index_of(built, tag, nested)
    (path / "blobs" / "sha256").mkdir(parents=True)
    for digest, data in {**built.blobs, **further}.items():
        (path / "blobs" / "sha256" / digest.removeprefix("sha256:")).write_bytes(data)
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (path / "index.json").write_text(json.dumps(index))
    return path


def write_saved(path: Path, layers: Iterable[Iterable[Entry]], tag: str, **config: Any) -> Path:
    """As `docker save` of Docker 24 and older."""
    built = build(layers, packed=False, **config)
    names = [f"{diff[7:19]}/layer.tar" for diff in built.layers]
    files = [file(name, built.blobs[diff]) for name, diff in zip(names, built.layers, strict=True)]
    described = [{"Config": "config.json", "RepoTags": [f"world:{tag}"], "Layers": names}]
    files += [file("config.json", built.blobs[built.config]), file("manifest.json", json.dumps(described).encode())]
    path.write_bytes(archive(files))
    return path


def programs(names: Iterable[str] = PROGRAMS) -> list[Entry]:
    """Programs of this machine, with the libraries that they need."""
    found: dict[str, Entry] = {}
    for name in names:
        path = shutil.which(name)
        assert path, name
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r"(/\S+) \(0x", listed):
            found[library] = file(library.lstrip("/"), Path(library).read_bytes(), 0o755)
        found[f"bin/{name}"] = file(f"bin/{name}", Path(path).read_bytes(), 0o755)
    return list(found.values())
