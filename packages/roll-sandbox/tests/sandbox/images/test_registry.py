"""Pulling from a registry: the protocol, and every way in which one can fail or lie."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from sandbox.images.oci import MACHINE, Built, build, digest_of, file
from sandbox.images.registry_server import Registry, registry_of, serving

from roll_sandbox import (
    BadImageError,
    SandboxAccessError,
    SandboxRequestError,
    SandboxUnavailableError,
    UnknownImageError,
)
from roll_sandbox.images import Image, ImageCache, parse_reference
from roll_sandbox.images.registry import RegistrySource


@pytest.fixture
def built() -> Built:
    return build([[file("one", b"1" * 5000)], [file("two", b"2")]], Env=["A=b"])


@pytest.fixture(autouse=True)
def no_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path / "config.json"


def pull(tmp_path: Path, registry: Registry, name: str = "a/world", **settings: Any) -> Image:
    with serving(registry) as address:
        source = RegistrySource(parse_reference(f"{address}/{name}"), backoff_s=(0.0, 0.0, 0.0), **settings)
        return ImageCache(tmp_path / "cache", budget_bytes=2**24).add(f"{address}/{name}", source)


def test_sandbox_image_registry_an_image_is_pulled_by_tag_and_by_digest(tmp_path: Path, built: Built) -> None:
    registry = registry_of(built, "7")
    image = pull(tmp_path, registry, "a/world:7")
    assert (image.digest, image.layers, image.env) == (built.config, built.layers, {"A": "b"})
    layer = ImageCache(tmp_path / "cache").list_layer_directories(image)[0]
    assert Path(layer, "one").read_bytes() == b"1" * 5000
    assert pull(tmp_path, registry, f"a/world@{built.manifest}") == image
    assert sum("/blobs/" in path for path, _ in registry.asked) == 4, "layers that are here are not fetched again"


def test_sandbox_image_registry_of_an_index_the_image_for_this_machine_is_taken(tmp_path: Path, built: Built) -> None:
    registry = registry_of(built)
    other = {"digest": digest_of(b"other"), "platform": {"os": "linux", "architecture": "mips"}}
    own = {"digest": built.manifest, "platform": {"os": "linux", "architecture": MACHINE}}
    registry.manifests["latest"] = json.dumps({"manifests": [other, own]}).encode()
    assert pull(tmp_path, registry).digest == built.config
    registry.manifests["latest"] = json.dumps({"manifests": [other]}).encode()
    with pytest.raises(BadImageError, match="linux/mips"):
        pull(tmp_path, registry)


def test_sandbox_image_registry_a_token_is_fetched_where_one_is_asked_for_and_not_taken_elsewhere(
    tmp_path: Path, built: Built
) -> None:
    registry = registry_of(built, token="secret", redirect=True)
    assert pull(tmp_path, registry).digest == built.config
    elsewhere = [authorization for path, authorization in registry.asked if path.startswith("/elsewhere/")]
    assert elsewhere == ["", "", ""]
    assert sum(path == "/token" for path, _ in registry.asked) == 1


def test_sandbox_image_registry_passwords_are_dockers(tmp_path: Path, built: Built, no_passwords: Path) -> None:
    registry = registry_of(built, token="secret", password="ann:pass")
    with pytest.raises(SandboxAccessError, match="docker login"):
        pull(tmp_path, registry)
    with serving(registry) as address:
        auth = base64.b64encode(b"ann:pass").decode()
        no_passwords.write_text(json.dumps({"auths": {f"https://{address}/v1/": {"auth": auth}}}))
        source = RegistrySource(parse_reference(f"{address}/a/world"), backoff_s=())
        assert source.image.digest == built.config
    blobs = [authorization for path, authorization in registry.asked if "/blobs/" in path]
    assert set(blobs) == {"Bearer secret"}, "the password goes to who gives tokens, and to nobody else"


@pytest.mark.parametrize("failures", [[500], [503, "cut"], ["cut", 429, 502]], ids=str)
def test_sandbox_image_registry_what_may_pass_is_tried_again(tmp_path: Path, built: Built, failures: list[Any]) -> None:
    assert pull(tmp_path, registry_of(built, failures=failures)).digest == built.config


@pytest.mark.parametrize(
    ("failures", "error", "message"),
    [
        ([500] * 4, SandboxUnavailableError, "500"),
        (["cut"] * 4, SandboxUnavailableError, "cannot download"),
        (["wrong"], BadImageError, "digest mismatch"),
        ([None, "wrong"], BadImageError, "digest mismatch"),
        (["long"], BadImageError, "more than"),
        ([None, "long"], BadImageError, "more than"),
        ([None, 404], UnknownImageError, "has no image"),
        ([None, 403], SandboxAccessError, "docker login"),
    ],
    ids=str,
)
def test_sandbox_image_registry_what_does_not_pass_is_told(
    tmp_path: Path, built: Built, failures: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pull(tmp_path, registry_of(built, failures=failures))
    assert ImageCache(tmp_path / "cache").list() == []


def test_sandbox_image_registry_an_image_that_the_registry_does_not_have_is_unknown(
    tmp_path: Path, built: Built
) -> None:
    with pytest.raises(UnknownImageError, match="has no image"):
        pull(tmp_path, registry_of(built), "a/world:nothing")


def test_sandbox_image_registry_a_manifest_must_be_what_its_digest_says(tmp_path: Path, built: Built) -> None:
    registry = registry_of(built)
    registry.manifests[built.manifest] += b" "
    with pytest.raises(BadImageError, match="digest mismatch"):
        pull(tmp_path, registry, f"a/world@{built.manifest}")


@pytest.mark.parametrize(
    "said", [b"{}", b"[]", b"noise", b'{"config": {"digest": "sha256:../../x", "size": 1}, "layers": []}', b"[" * 10**5]
)
def test_sandbox_image_registry_a_manifest_that_is_none_is_refused(tmp_path: Path, built: Built, said: bytes) -> None:
    registry = registry_of(built)
    registry.manifests["latest"] = said
    with pytest.raises(BadImageError):
        pull(tmp_path, registry)


def test_sandbox_image_registry_a_layer_that_is_to_be_larger_than_may_be_is_not_asked_for(
    tmp_path: Path, built: Built
) -> None:
    registry = registry_of(built)
    with pytest.raises(BadImageError, match="must not exceed 10 bytes"):
        pull(tmp_path, registry, max_blob_bytes=10)
    assert sum("/blobs/" in path for path, _ in registry.asked) == 1, "the configuration"


def test_sandbox_image_registry_nobody_there_is_told() -> None:
    with pytest.raises(SandboxUnavailableError, match="cannot download"):
        RegistrySource(parse_reference("127.0.0.1:1/a/world"), backoff_s=())


def test_sandbox_image_registry_a_name_without_a_registry_is_nowhere_to_be_pulled_from() -> None:
    with pytest.raises(SandboxRequestError, match="has no registry"):
        RegistrySource(parse_reference("python:3"))


def test_sandbox_image_registry_beyond_this_machine_tls_is_spoken_unless_otherwise_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    urls: list[str] = []

    def refuse(self: RegistrySource, url: str, *_: object) -> None:
        urls.append(url)
        raise OSError("no network in tests")

    monkeypatch.setattr(RegistrySource, "_fetch_once", refuse)
    for name, insecure in (("r.example/a", False), ("r.example/a", True), ("localhost:1/a", False)):
        with pytest.raises(SandboxUnavailableError):
            RegistrySource(parse_reference(name), insecure=insecure, backoff_s=())
    assert urls == [
        "https://r.example/v2/a/manifests/latest",
        "http://r.example/v2/a/manifests/latest",
        "http://localhost:1/v2/a/manifests/latest",
    ]
