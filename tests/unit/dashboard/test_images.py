"""Images of rollouts: their address, their PNGs, and what is refused."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from unit.dashboard.conftest import client_of, ids
from unit.tracking.conftest import make_group

from roll.dashboard.rollout_details import build_details
from roll.dashboard.rollouts import encode_row
from roll.dashboard.vocabulary import Vocabulary
from roll.media import MediaStore, compute_digest
from roll.media.stored_images import describe_images, find_image
from roll.tracking.reading.files import SafeDirectory
from roll.tracking.rollout_table import write_rollouts
from roll.types import ImagePart, MediaSpan, Message, TextPart

MakeRun = Callable[..., Path]
ABSENT = "0f" * 32


def draw(width: int, height: int, color: tuple[int, int, int] = (255, 0, 0)) -> Image.Image:
    image = Image.new("RGB", (width, height), color)
    image.putpixel((0, 0), (0, 0, 255))
    return image


def add(run: Path, image: Image.Image) -> str:
    return MediaStore(run / "media").add_image(image)


def place(run: Path, digest: str) -> Path:
    return run / "media" / digest[:2] / digest


def open_png(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    assert image.format == "PNG"
    return image


@pytest.fixture
def run(make_run: MakeRun) -> Path:
    """A run whose first rollout of step 2 has a prompt with two images, one of which is missing."""
    path = make_run()
    digest = add(path, draw(40, 20))
    content = (TextPart(text="Look: "), ImagePart(digest=digest), TextPart(text=" and "), ImagePart(digest=ABSENT))
    group = make_group(4)
    prompt = replace(group.draw.prompt, messages=(Message(role="user", content=content),))
    media = (MediaSpan(kind="image", digest=digest, start=0, end=1),)
    rollouts = tuple(replace(one, prompt=prompt, prompt_media=media) for one in group.rollouts)
    write_rollouts(path / "rollouts" / "step-000002.parquet", 2, [replace(group, rollouts=rollouts)])
    return path


def address(client: TestClient) -> str:
    return f"/api/runs/{ids(client)['demo']}"


def test_dashboard_images_are_served_as_png_with_fixed_headers(run: Path) -> None:
    client, digest = client_of(run), compute_digest(draw(40, 20))
    answer = client.get(f"{address(client)}/images/{digest}")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"
    assert np.array_equal(np.asarray(open_png(answer.content)), np.asarray(draw(40, 20)))
    again = client.get(f"{address(client)}/images/{digest}", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    small = client.get(f"{address(client)}/images/{digest}?size=thumbnail")
    assert small.status_code == 200 and small.headers["etag"] != answer.headers["etag"]
    head = client.head(f"{address(client)}/images/{digest}")
    assert (head.status_code, head.headers["content-type"]) == (200, "image/png")


def test_dashboard_images_are_found_by_the_first_characters_which_are_not_cached(run: Path) -> None:
    client, digest = client_of(run), compute_digest(draw(40, 20))
    answer = client.get(f"{address(client)}/images/{digest[:12]}")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-cache")
    twin = digest[:12] + "0" * 52
    place(run, twin).write_bytes(b"another")
    answer = client.get(f"{address(client)}/images/{digest[:12]}")
    assert answer.status_code == 404 and "2 images" in answer.json()["error"]


@pytest.mark.parametrize(("size", "longest"), [("thumbnail", 256), ("full", 2048)])
@pytest.mark.parametrize("shape", [(3000, 30), (1, 2500), (7, 5)])
def test_dashboard_images_that_are_large_are_scaled_down(
    run: Path, size: str, longest: int, shape: tuple[int, int]
) -> None:
    client = client_of(run)
    digest = add(run, draw(*shape))
    shown = open_png(client.get(f"{address(client)}/images/{digest}?size={size}").content)
    factor = min(1.0, longest / max(shape))
    assert shown.size == tuple(max(1, round(side * factor)) for side in shape)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (ABSENT, "is not in the run's media store"),
        (ABSENT[:12], "is not in the run's media store"),
        ("0f" * 5, "is not a valid digest"),
        ("0F" * 32, "is not a valid digest"),
        ("0f" * 33, "is not a valid digest"),
        ("..%2F..%2Fconfig.yaml", "Not Found"),
        ("..%5Cconfig.yaml", "is not a valid digest"),
        ("%00" * 12, "is not a valid digest"),
    ],
)
def test_dashboard_images_that_do_not_exist_are_refused(run: Path, name: str, error: str) -> None:
    client = client_of(run)
    answer = client.get(f"{address(client)}/images/{name}")
    assert answer.status_code == 404 and error in answer.json()["error"]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-cache"


def test_dashboard_images_of_another_size_are_refused(run: Path) -> None:
    client, digest = client_of(run), compute_digest(draw(40, 20))
    assert client.get(f"{address(client)}/images/{digest}?size=9000").status_code == 400


@pytest.mark.parametrize("kind", ["html", "svg", "other image", "link", "pipe", "empty", "huge", "bomb"])
def test_dashboard_images_whose_files_are_hostile_are_refused(run: Path, tmp_path: Path, kind: str) -> None:
    digest = compute_digest(draw(40, 20))
    path = place(run, digest)
    content = path.read_bytes()
    path.unlink()
    if kind == "html":
        path.write_bytes(b"<script>alert(1)</script>")
    elif kind == "svg":
        path.write_bytes(b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>')
    elif kind == "other image":
        place(run, add(run, draw(40, 20, (0, 255, 0)))).rename(path)
    elif kind == "link":
        (tmp_path / "secret.png").write_bytes(content)
        path.symlink_to(tmp_path / "secret.png")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "huge":
        path.write_bytes(content)
        os.truncate(path, 64 * 2**20 + 1)  # a sparse file
    elif kind == "bomb":
        encoded = io.BytesIO()
        Image.new("1", (30_000, 30_000)).save(encoded, "PNG")
        path.write_bytes(encoded.getvalue())
    client = client_of(run)
    for size in ("full", "thumbnail"):
        answer = client.get(f"{address(client)}/images/{digest}?size={size}")
        assert answer.status_code == 404, answer.content[:100]
        assert answer.headers["content-type"] == "application/json"
        assert "image" in answer.json()["error"] or "larger than" in answer.json()["error"]


def test_dashboard_images_of_one_run_are_not_shown_in_another(make_run: MakeRun) -> None:
    first, second = make_run("first"), make_run("second")
    digest = add(first, draw(8, 8))
    client = client_of(first.parent)
    runs = ids(client)
    assert client.get(f"/api/runs/{runs['first']}/images/{digest}?size=thumbnail").status_code == 200
    assert client.get(f"/api/runs/{runs['second']}/images/{digest}?size=thumbnail").status_code == 404
    assert second.exists()


def test_dashboard_images_need_the_token(run: Path) -> None:
    run_id = ids(client_of(run))["demo"]
    guarded = client_of(run, token="secret")
    url = f"/api/runs/{run_id}/images/{compute_digest(draw(40, 20))}"
    assert guarded.get(url).status_code == 401
    assert guarded.get(url, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert guarded.get(url, headers={"Authorization": "Bearer secret", "host": "evil.example"}).status_code == 403


def test_dashboard_images_of_a_rollout_are_listed_with_their_problem(run: Path) -> None:
    client, digest = client_of(run), compute_digest(draw(40, 20))
    found = client.get(f"{address(client)}/rollouts/{encode_row(2, 'train', 0)}").json()
    assert found["messages"][0]["content"] == f"Look: [image {digest[:12]}] and [image {ABSENT[:12]}]"
    one, other = found["images"][digest[:12]], found["images"][ABSENT[:12]]
    assert one == {"digest": digest, "bytes": place(run, digest).stat().st_size, "problem": None}
    assert other["bytes"] is None and "not in the run's media store" in other["problem"]


def test_dashboard_images_are_not_looked_for_in_a_run_of_text(make_run: MakeRun) -> None:
    inside = SafeDirectory(make_run())
    row: dict[str, Any] = {"prompt": "p", "text": "t", "messages": [{"role": "user", "content": f"[image {'0f' * 6}]"}]}
    assert build_details(row, None, inside)["images"] == {}


def test_dashboard_images_of_observations_stand_where_their_tokens_are(run: Path) -> None:
    digest = compute_digest(draw(40, 20))
    words = Vocabulary(Tokenizer(WordLevel({f"w{i}": i for i in range(9)}, unk_token="w0")))
    row: dict[str, Any] = {
        "token_ids": [1, 2, 3, 7, 7, 7, 4, 5],
        "policy_versions": [1, 1, -1, -1, -1, -1, -1, 1],
        "media": [{"kind": "image", "digest": digest, "start": 3, "end": 6, "grid": None}],
    }
    found = build_details(row, words, SafeDirectory(run))
    assert [turn["text"] for turn in found["turns"][1:]] == ["w1 w2", f"w3[image {digest[:12]}]w4", "w5"]
    assert found["images"][digest[:12]]["problem"] is None
    # A span that reaches into the model's own tokens is not one that a run writes.
    wrong = build_details(row | {"media": [row["media"][0] | {"end": 8}]}, words, SafeDirectory(run))
    assert [turn["text"] for turn in wrong["turns"][1:]] == ["w1 w2", "w3 w7 w7 w7 w4", "w5"]


def test_images_in_texts_of_the_terminal_show_their_size(run: Path) -> None:
    digest, inside = compute_digest(draw(40, 20)), SafeDirectory(run)
    size = place(run, digest).stat().st_size / 1024
    assert describe_images(inside, f"a [image {digest[:12]}] b [image {ABSENT[:12]}]") == (
        f"a [image {digest[:12]}: 40 × 20 pixels, {size:.1f} KiB] "
        f"b [image {ABSENT[:12]}: missing from the run's media store]"
    )
    place(run, digest).write_bytes(b"no image")
    assert describe_images(inside, f"[image {digest[:12]}]") == f"[image {digest[:12]}: corrupted, 0.0 KiB]"
    assert find_image(inside, digest).num_bytes == 8
