"""What anybody may write to the service is bounded before it is read: documents, messages, archives' headers."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")

from sqlalchemy import insert, select, text

from roll_sandbox import SandboxRequestError
from roll_sandbox.service import sockets, worker_link
from roll_sandbox.service.archives import check_archive
from roll_sandbox.service.quotas import Quota
from roll_sandbox.service.service import Service
from roll_sandbox.service.settings import Settings
from roll_sandbox.service.store import Store, tables
from roll_sandbox.service.store.writer import _run_callbacks
from roll_sandbox.service.tokens import TokenStore
from roll_sandbox.wire import (
    Outbox,
    decode,
    encode,
    parse_json,
    program_from_json,
    report_from_json,
    spec_from_json,
    validate_client_message,
    validate_worker_message,
)
from roll_sandbox.worker.executions import ProgramRunner
from roll_sandbox.worker.outputs import OutputBudget


def framed(text: bytes, *pieces: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "little") + part for part in (text, *pieces))


@pytest.mark.parametrize(
    ("document", "word"),
    [
        (b"[" * 65 + b"]" * 65, "nested more than"),
        (b'[{"a":' * 40 + b"1" + b"}]" * 40, "nested more than"),
        (b"[" + b"[]," * 2**19 + b"1]", "values"),
        (b"[" + b'"",' * 2**19 + b"1]", "values"),
        (b'"' + b'\\",[' * 2**17 + b"x" * 9 + b'\\" [' * 99, "not valid JSON"),
        ("[1]".encode("utf-16"), "not valid JSON"),
        (b"[\xff]", "not valid JSON"),
        (b"9" * 10**5, "not valid JSON"),
    ],
)
def test_sandbox_untrusted_text_documents_are_counted_before_anything_is_made_of_them(
    document: bytes, word: str
) -> None:
    with pytest.raises(SandboxRequestError, match=word):
        parse_json(document)


def test_sandbox_untrusted_text_may_have_what_they_like() -> None:
    long = '["{[,\\"' * 2**16
    assert parse_json(encode({"text": long})[4:]) == {"text": long}
    assert parse_json(b"[" * 64 + b"]" * 64)[0][0]


def test_sandbox_untrusted_text_a_piece_of_data_is_named_once() -> None:
    assert decode(framed(b'{"a":{"$b":0}}', b"x")) == {"a": b"x"}
    for message in (framed(b'{"a":{"$b":0},"b":{"$b":0}}', b"x"), framed(b"{}", *[b""] * (2**17 + 1))):
        with pytest.raises(SandboxRequestError, match=r"twice|pieces"):
            decode(message)


@pytest.mark.parametrize("number", [10**400, -(10**400), float("inf"), float("nan")])
def test_sandbox_untrusted_text_numbers_that_nothing_can_compute_with_are_refused(number: float) -> None:
    extend = {"op": "extend", "sandbox": "a" * 8, "lifetime_s": number}
    for refused in (
        lambda: validate_client_message(extend),
        lambda: program_from_json({"argv": ["true"], "wall_s": number}, b""),
        lambda: program_from_json({"argv": ["true"], "cpu_s": number}, b""),
        lambda: spec_from_json({"limits": {"wall_s": number}}),
        lambda: spec_from_json({"limits": {"memory_bytes": number}}),
    ):
        with pytest.raises(SandboxRequestError):
            refused()


@pytest.mark.parametrize("said", [{"image": "a" * 2**17}, {"preload": ["re"] * 2**14}, {"affinity": "a" * 2**17}])
def test_sandbox_untrusted_text_a_spec_that_would_fill_the_database_is_refused(said: dict[str, object]) -> None:
    with pytest.raises(SandboxRequestError, match="shorten"):
        spec_from_json(said)


def member(kind: bytes, body: bytes) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, len(body)
    return info.tobuf(tarfile.USTAR_FORMAT) + body + b"\0" * (-len(body) % 512)


_FILE = tarfile.TarInfo("y").tobuf()


@pytest.mark.parametrize(
    "archive",
    [
        member(b"x", b"1" * 10**5),
        member(b"x", b"6 a=b\n") * 1000,
        member(b"L", b"name\0") * 1000,
        member(b"g", b"".join(b"9 %04d=\n" % each for each in range(1000)).replace(b"9 ", b"8 ")) + _FILE * 2,
        member(b"x", b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n") + member(b"0", b"99999999\n" + b"0\n" * 10**5),
        member(b"x", b"x" * 2**18),
    ],
    ids=["digits", "chain", "names", "global", "sparse", "long"],
)
def test_sandbox_untrusted_text_headers_that_would_hold_the_service_up_are_refused(archive: bytes) -> None:
    began = time.process_time()
    with pytest.raises(SandboxRequestError, match=r"header|sparse|kind|plain"):
        check_archive(archive + _FILE + b"\0" * 1024, 2**20, 100)
    assert time.process_time() - began < 5


def test_sandbox_untrusted_text_archives_with_long_names_and_times_are_plain() -> None:
    file = io.BytesIO()
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with tarfile.open(fileobj=file, mode="w", format=form) as archive:
            info = tarfile.TarInfo("é" * 90)
            info.size, info.mtime = 3, 1700000000.5 if form == tarfile.PAX_FORMAT else 1
            archive.addfile(info, io.BytesIO(b"abc"))
        check_archive(file.getvalue(), 2**20, 100)


_PROGRAM = {"id": "p" * 8, "words": "true", "terminal": False, "began": 1.0, "seen": 0, "output": b"", "end": None}
_HELD = {"traits": {"home": "/", "isolated": True, "mount_space": True}, "programs": ["p" * 8]}
_NEWS = [
    {
        "op": "created",
        "sandbox": "ann/a",
        "traits": {"home": "/", "isolated": True, "mount_space": True, "image": None},
    },
    {"op": "gone", "sandbox": "ann/a", "error": "path", "message": "m", "errno": 2, "path": "x"},
    {"op": "out", "sandbox": "ann/a", "id": "p" * 8, "n": 0, "stream": "stdout", "data": b"x"},
    {"op": "used", "sandbox": "ann/a", "id": "p" * 8, "n": 1, "used_s": 0.5},
    {"op": "end", "sandbox": "ann/a", "id": "p" * 8, "end": {"code": 0, "limits": ["memory"]}, "pieces": 1},
    {"op": "looked", "sandbox": "ann/a", "id": "p" * 8, "cpu_s": 1.0, "memory_bytes": 1, "programs": [_PROGRAM]},
    {"op": "beat", "leaving": False, "report": {}},
    {"op": "leave"},
]


@pytest.mark.parametrize("news", _NEWS, ids=[str(each["op"]) for each in _NEWS])
def test_sandbox_untrusted_text_a_worker_is_heard_where_all_it_says_is_of_its_kind(news: dict[str, object]) -> None:
    assert validate_worker_message({**news, "more": 1}) == news
    for name in news:
        for wrong in ([1], {"limits": 1}, "\ud800" * 2**17, -1, 10**400, float("nan"), True):
            if name != "report" and not (name == "leaving" and wrong is True):
                with pytest.raises(SandboxRequestError):
                    validate_worker_message({**news, name: wrong})


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("end", {"code": 0, "limits": ["nothing"]}),
        ("end", {"wall_s": "long"}),
        ("programs", [{**_PROGRAM, "began": 1e12}]),
        ("programs", [{**_PROGRAM, "end": {"limits": 3}}]),
    ],
)
def test_sandbox_untrusted_text_ends_that_no_client_could_read_are_not_passed_on(field: str, wrong: object) -> None:
    news = next(each for each in _NEWS if field in each)
    with pytest.raises(SandboxRequestError, match=field):
        validate_worker_message({**news, field: wrong})


def test_sandbox_untrusted_text_a_worker_says_what_it_holds_in_names() -> None:
    join = {"op": "join", "name": "w" * 8, "process": "1", "capacity": 1, "leaving": False, "report": {}}
    assert validate_worker_message({**join, "holds": {"ann/a": _HELD}})["holds"] == {"ann/a": _HELD}
    for holds in ([], {"ann/a": {}}, {"ann/a": {**_HELD, "programs": [1]}}, {"ann/a": {**_HELD, "traits": {}}}):
        with pytest.raises(SandboxRequestError, match="holds"):
            validate_worker_message({**join, "holds": holds})


_POOL = {"pool": "host-1", "idle": 0, "target": 0, "hits": 0, "misses": 0}


@pytest.mark.parametrize(
    "said",
    [
        {"cores": 0},
        {"busy": float("inf")},
        {"free_bytes": -1},
        {"images": ["a\x1b[31m"]},
        {"pools": [{**_POOL, "pool": 'x"} 1\nroll_sandbox_alive 9'}]},
        {"pools": [_POOL] * 33},
    ],
)
def test_sandbox_untrusted_text_a_report_that_would_break_placing_or_metrics_is_refused(
    said: dict[str, object],
) -> None:
    with pytest.raises(SandboxRequestError):
        report_from_json(said)


def test_sandbox_untrusted_text_rows_that_a_hand_or_another_version_wrote_stop_no_server(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/sandboxes.db"
    store = Store(address)
    store.migrate()
    token, other = (TokenStore(store).create(owner) for owner in ("ann", "ben"))
    row = {"owner": "ann", "worker": "worker-a", "state": "running", "why": "", "created": 1.0, "expires": 9e9}
    for name, spoilt in (
        ("json", {"spec": "{"}),
        ("newer", {"spec": '{"colour": "red"}'}),
        ("deep", {"spec": "[" * 10**5}),
        ("time", {"spec": "{}"}),
    ):
        store.write_now(insert(tables.sandboxes).values({**row, "name": name * 4, **spoilt}))
    for owner, quota in (("ann", '{"sandboxes": "7", "cpu_s": 3, "colour": 1}'), ("ben", "[]"), ("cid", "{")):
        store.write_now(insert(tables.owners).values(owner=owner, quota=quota))
    run = {"owner": "ann", "sandbox": "s" * 8, "state": "ended", "started": 1.0, "pieces": 0, "output_bytes": 0}
    for name, end in (("bad", "{"), ("odd", '{"end": {"limits": ["x"]}}'), ("good", '{"end": {"code": 3}}')):
        store.write_now(insert(tables.executions).values({**run, "name": name, "end": end}))
    store.write_now(text("UPDATE sandboxes SET expires = 'soon' WHERE name = 'timetimetimetime'"))
    store.write_now(text("UPDATE tokens SET expires = 'never', digest = 'é' WHERE owner = 'ben'"))

    async def opened() -> None:
        service = Service(Settings(database=address, runtime=None))
        await service.start()
        assert not service.dispatcher.entries
        assert service.quotas.get("ann") == Quota(cpu_s=3) and service.quotas.get("ben") == Quota()
        assert service.tokens.identify(token) is not None and service.tokens.identify(other) is None
        ends = [service.dispatcher.records.load_program("ann", "s" * 8, name).end for name in ("bad", "odd", "good")]
        assert ends == [None, None, {"end": {"code": 3}}]
        await service.close()

    asyncio.run(opened())
    ended = store.read(select(tables.sandboxes.c.why))
    store.close()
    assert [each.why for each in ended] == ["lost"] * 4


def test_sandbox_untrusted_text_one_follower_that_fails_takes_no_others_along(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Exception | None] = []
    _run_callbacks([(told.append, None), (lambda _: 1 / 0, None), (told.append, None)])
    assert told == [None, None] and "ZeroDivisionError" in caplog.text


def test_sandbox_untrusted_text_the_largest_output_goes_first_and_once() -> None:
    outputs, dropped = OutputBudget(100), []
    for name, size in (("a", 40), ("b", 30), ("a", 20), ("c", 20)):
        outputs.add(("ann/a", name), size, lambda name=name: dropped.append(name))
    assert dropped == ["a"] and outputs.total_bytes == 50
    outputs.release(("ann/a", "b"))
    outputs.release(("ann/a", "b"))
    assert outputs.total_bytes == 20


class Deaf:
    """A WebSocket whose peer reads nothing."""

    closed = False

    async def send_bytes(self, data: bytes) -> None:
        await asyncio.Event().wait()

    async def receive_bytes(self) -> bytes:
        return await asyncio.Event().wait() or b""

    async def close(self) -> None:
        self.closed = True


def test_sandbox_untrusted_text_peers_that_read_nothing_are_hung_up_on_for_all_lines_of_an_owner_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "_MAX_QUEUED_BYTES_PER_OWNER", 1000)
    waiting: Counter[str] = Counter()

    async def listened() -> None:
        peers = [Deaf(), Deaf()]
        channels = [sockets.Channel(peer, "ann", None, waiting) for peer in peers]
        serving = [asyncio.create_task(channel.serve(lambda message: None)) for channel in channels]
        channels[0].send({"data": b"x" * 600})
        channels[1].send({"data": b"x" * 600})
        await asyncio.wait_for(serving[1], 5)
        assert peers[1].closed and not peers[0].closed and waiting["ann"] < 700
        channels[0].close()
        await asyncio.wait_for(serving[0], 5)
        assert peers[0].closed and waiting["ann"] == 0

    asyncio.run(listened())


def test_sandbox_untrusted_text_what_waits_for_a_worker_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "_MAX_QUEUED_BYTES", 1000)
    link = worker_link.WorkerLink("worker-a", None)
    for _ in range(9):
        link.send({"op": "input", "data": b"x" * 400})
    assert len(link.queued) == 3


class Busy:
    """A sandbox whose shell is always at another command."""

    async def start(self, command: str, *, wall_s: float) -> None:
        await asyncio.Event().wait()


def test_sandbox_untrusted_text_what_waits_for_a_command_is_bounded_in_bytes() -> None:
    told: list[dict[str, object]] = []
    place = {"sandbox": "ann/a", "id": "line-0001"}

    async def flooded() -> None:
        executions = ProgramRunner("ann/a", None, told.append, OutputBudget())  # type: ignore[arg-type]
        executions._sessions["shell-01"] = Busy()  # type: ignore[assignment]
        request = {"command": "cat", "wall_s": 1.0}
        executions.receive({"op": "line", **place, "shell": "shell-01", "request": request})
        for number in range(1, 12):
            executions.receive({"op": "input", **place, "n": number, "data": b"x" * 2**20})
        await asyncio.sleep(0)

    asyncio.run(flooded())
    assert [(each["op"], each["error"]) for each in told] == [("error", "request")]


def test_sandbox_untrusted_text_an_outbox_says_that_nobody_keeps_up() -> None:
    outbox = Outbox(100)
    for _ in range(3):
        outbox.put(b"x" * 40)
    assert outbox.is_full.is_set()
    outbox.clear()
    outbox.put(b"x" * 100)
    assert not outbox.is_full.is_set()


class Peer(asyncio.Transport):
    """A connection that keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.said, self.closed = b"", False

    def write(self, data: bytes) -> None:
        self.said += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        """Nothing comes anyway."""

    resume_reading = pause_reading


_HEAD = b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("pieces", "refused"),
    [
        ([_HEAD + b"X: ", *[b"a" * 2**16] * 5], True),
        ([_HEAD, *[b"X: a\r\n" * 2**14] * 3], True),
        ([_HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", *[b"X: a\r\n" * 2**14] * 3], True),
        ([_HEAD + b"Content-Length: 1000000\r\n\r\n", *[b"a" * 10**5] * 9], False),
        ([_HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"10000\r\n" + b"a" * 2**16 + b"\r\n"] * 9], False),
    ],
    ids=["line", "lines", "trailer", "body", "chunks"],
)
def test_sandbox_untrusted_text_what_is_around_a_body_is_bounded_before_anybody_asks_for_a_token(
    pieces: list[bytes], refused: bool
) -> None:
    http_limits = pytest.importorskip("roll_sandbox.service.http_limits", exc_type=ImportError)
    uvicorn = pytest.importorskip("uvicorn")

    async def app(scope: object, receive: object, send: object) -> None:
        await asyncio.Event().wait()

    async def sent() -> tuple[bool, bool]:
        config, peer = uvicorn.Config(app, lifespan="off", log_config=None), Peer()
        config.load()
        protocol = http_limits.BoundedHttpProtocol(
            config, uvicorn.server.ServerState(), {}, _loop=asyncio.get_running_loop()
        )
        protocol.connection_made(peer)
        for piece in pieces:
            protocol.data_received(piece)
        return peer.closed, peer.said.startswith(b"HTTP/1.1 400")

    assert asyncio.run(sent()) == (refused, refused)
