"""Quotas counted in and out, the audit file, tokens at rest: without a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")

from roll_sandbox import Limits, SandboxQuotaError, SandboxSpec
from roll_sandbox.errors import ConfigError
from roll_sandbox.service.audit import AuditLog
from roll_sandbox.service.dispatcher import ClientConnection, Dispatcher
from roll_sandbox.service.housekeeper import restore_sandbox
from roll_sandbox.service.quotas import Quota, Quotas
from roll_sandbox.service.records import RecordStore
from roll_sandbox.service.store import Store
from roll_sandbox.service.tokens import Identity, TokenStore
from roll_sandbox.service.worker_link import WorkerLink
from roll_sandbox.wire import spec_to_json

SPEC = SandboxSpec(limits=Limits(memory_bytes=100, disk_bytes=10))
QUOTA = Quota(sandboxes=3, memory_bytes=250, programs=2, cpu_s=5.0)


class _Written(RecordStore):
    """Records whose writes the test completes or fails."""

    def __init__(self) -> None:
        self.pending: list[Any] = []

    def record_sandbox(self, *arguments: Any, **_: Any) -> None:
        self.pending.append(arguments[-1])

    record_program = record_program_end = record_sandbox

    def record_sandbox_end(self, *arguments: Any) -> None:
        if arguments[-1] is not None:
            self.pending.append(arguments[-1])

    def record_running(self, *_: Any) -> None: ...


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=60))
def test_sandbox_service_quota_what_is_taken_is_what_is_alive_however_sandboxes_and_programs_end(
    steps: list[tuple[int, int]],
) -> None:
    written, sent = _Written(), []
    board = Dispatcher(written, Quotas(QUOTA, {}), AuditLog(None))
    board.workers["w"] = WorkerLink("w", sent.append)
    line = ClientConnection(Identity("t", "ann", frozenset({"run"})), lambda _: None)
    for step, number in steps:
        sandbox, place = f"sandbox-{number % 3}", f"ann/sandbox-{number % 3}"
        program = {"sandbox": sandbox, "id": f"program-{number}"}
        if step == 0:
            board.on_client_message(line, {"op": "create", "sandbox": sandbox, "spec": spec_to_json(SPEC)})
        elif step == 1:
            board.on_client_message(line, {"op": "run", **program, "request": {}, "stdin": b""})
        elif step == 2 and written.pending:
            written.pending.pop(0)(None)
        elif step == 3 and written.pending:
            written.pending.pop(0)(RuntimeError("refused"))
        elif step == 4:
            board.on_worker_message({"op": "end", **program, "sandbox": place, "end": {}})
        elif step == 5:
            board.on_worker_message({"op": "gone", "sandbox": place, "error": "lost", "message": ""})
        elif step == 6:
            board.on_worker_message({"op": "created", "sandbox": place, "traits": {}})
        elif step == 7:
            row: Any = SimpleNamespace(owner="ann", name=sandbox, worker="w", state="running", leased=1)
            row.spec, row.created, row.expires = json.dumps(spec_to_json(SPEC)), 0.0, 9e9
            if place not in board.entries:
                restore_sandbox(board, row, {"program-9": "running"})
        alive = len(board.entries)
        running = sum(entry.num_running for entry in board.entries.values())
        assert board.quotas.get_usage("ann") == {
            "sandboxes": alive,
            "memory_bytes": 100 * alive,
            "disk_bytes": 10 * alive,
            "programs": running,
        }
        assert board.workers["w"].num_sandboxes == alive


def test_sandbox_service_quota_a_quota_may_be_used_up_to_the_last() -> None:
    quotas = Quotas(Quota(sandboxes=2, memory_bytes=200, disk_bytes=20, programs=1), {})
    for _ in range(2):
        quotas.add_sandbox("ann", quotas.check_sandbox("ann", SPEC))
    with pytest.raises(SandboxQuotaError, match="is 2 sandboxes"):
        quotas.check_sandbox("ann", SPEC)
    quotas.add_program("ann")
    with pytest.raises(SandboxQuotaError, match="runs 1 programs"):
        quotas.add_program("ann")
    for _ in range(2):
        quotas.remove_sandbox("ann", SPEC)
    quotas.remove_programs("ann")
    assert set(quotas.get_usage("ann").values()) == {0}


def test_sandbox_service_quota_an_error_says_what_and_how_much_and_what_to_do() -> None:
    quotas = Quotas(Quota(memory_bytes=250), {"ben": {"sandboxes": 0}})
    for _ in range(2):
        quotas.add_sandbox("ann", quotas.check_sandbox("ann", SPEC))
    with pytest.raises(SandboxQuotaError, match=r"is 250 bytes of memory: 200 are in use, and 100 more are requested"):
        quotas.check_sandbox("ann", SPEC)
    with pytest.raises(SandboxQuotaError, match="`roll-sandbox quota set ben`"):
        quotas.check_sandbox("ben", SPEC)
    quotas.set_overrides({})
    assert quotas.check_sandbox("ben", SPEC) == SPEC


def test_sandbox_service_quota_a_program_without_a_limit_of_cpu_time_gets_the_owners() -> None:
    quotas = Quotas(QUOTA, {})
    assert quotas.check_sandbox("ann", SPEC).limits.cpu_s == 5.0
    with pytest.raises(SandboxQuotaError, match="requests 6 s of CPU time"):
        quotas.check_cpu("ann", 6.0)


def test_sandbox_service_quota_the_audit_holds_hostile_names_on_one_short_line_each(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    for name in ("a\nb", "\x1b[2J\x1b]0;x\x07", "\u2028\x85", '"}\n{"action": "stop"', "x" * 2**20):
        audit.record("create", owner="ann", token="t", target=name, peer=name)
    audit.flush()
    lines = (tmp_path / "audit.jsonl").read_bytes().splitlines()
    assert len(lines) == 5 and max(map(len, lines)) < 2000
    assert all(json.loads(line)["action"] == "create" and line.isascii() and b"\x1b" not in line for line in lines)
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_sandbox_service_quota_an_audit_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    for name in ("one", "two"):
        audit.record(name, owner="ann", token="t")
        audit.flush()
        path.replace(tmp_path / name)
    audit.record("three", owner="ann", token="t")
    audit.close()
    for file in (tmp_path / "one", tmp_path / "two", path):
        assert len(file.read_text().splitlines()) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_sandbox_service_quota_an_audit_on_a_full_disk_keeps_its_lines_and_harms_nobody(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.symlink_to("/dev/full")
    audit = AuditLog(path)
    audit.record("create", owner="ann", token="t")
    audit.flush()
    assert audit.is_failing
    path.unlink()
    audit.flush()
    assert not audit.is_failing and json.loads(path.read_text())["action"] == "create"


@pytest.fixture
def tokens(database: str) -> TokenStore:
    store = Store(database)
    store.migrate()
    return TokenStore(store)


def test_sandbox_service_quota_only_a_digest_of_a_token_is_kept_and_any_other_secret_is_refused(
    tokens: TokenStore,
) -> None:
    made = {tokens.create("ann") for _ in range(50)}
    secrets = {token.split("_", 2)[2] for token in made}
    assert len(secrets) == 50 and {len(secret) for secret in secrets} == {43}
    assert not any(secret in str(tokens.list()) for secret in secrets)
    one, other = sorted(made)[:2]
    assert tokens.identify(one).owner == "ann"
    mixed = "_".join([*one.split("_")[:2], other.split("_", 2)[2]])
    for wrong in (mixed, one[:-1], one + "x", one.upper(), "", "roll__", "x" * 2**20, "\x00"):
        assert tokens.identify(wrong) is None


def test_sandbox_service_quota_a_token_that_is_rotated_is_good_for_its_grace_and_no_longer(
    tokens: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    old = tokens.create("ann", ["read"], lifetime_s=100.0)
    new = tokens.rotate(old.split("_")[1], grace_s=10.0)
    identity = tokens.identify(old)
    now = 1009.0
    assert tokens.identify(old) and tokens.is_valid(identity) and tokens.identify(new).scopes == {"read"}
    now = 1010.0
    assert tokens.identify(old) is None and not tokens.is_valid(identity)
    with pytest.raises(ConfigError, match=r"token .* is unknown or no longer valid"):
        tokens.rotate(old.split("_")[1])
    now = 1100.0
    assert tokens.identify(new) is None


def test_sandbox_service_quota_many_that_look_at_once_wait_for_no_connection_in_vain(tokens: TokenStore) -> None:
    token = tokens.create("ann")

    async def look() -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(tokens.identify, token) for _ in range(200)))

    assert all(identity.owner == "ann" for identity in asyncio.run(look()))
