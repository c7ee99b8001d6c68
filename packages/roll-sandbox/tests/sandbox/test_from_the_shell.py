"""`roll-sandbox run`, `shell`, `ls`, `logs`, `stop` and `top`, as processes, with real terminals."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest
from sandbox.conftest import _ROLL_SANDBOX, missing, served

from roll_sandbox.cli.inspection import _format_table
from roll_sandbox.cli.terminal import KeyFilter
from roll_sandbox.cli.terminal_filter import TerminalFilter

WAIT_S = 30.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables that name a service."""
    if reason := missing("service"):
        pytest.skip(reason)
    with served(tmp_path_factory.mktemp("service"), "--warm", "0") as (url, token):
        yield {**os.environ, "ROLL_SANDBOX_URL": url, "ROLL_SANDBOX_TOKEN": token}


def command(place: dict[str, str], *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*_ROLL_SANDBOX, *arguments], input=stdin, capture_output=True, env=place, timeout=WAIT_S)


def names(place: dict[str, str]) -> list[str]:
    return [each["sandbox"] for each in json.loads(command(place, "ls", "--json").stdout)]


class Person:
    """Somebody at a terminal, in which a command runs."""

    def __init__(self, place: dict[str, str], *arguments: str, rows: int = 24, columns: int = 80) -> None:
        self.terminal, theirs = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self.terminal)
        self.process = subprocess.Popen(
            [*_ROLL_SANDBOX, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**place, "TERM": "xterm", "LINES": "5", "COLUMNS": "9"},
            preexec_fn=lambda: (os.setsid(), ioctl(theirs, termios.TIOCSCTTY, 0)),
        )
        os.close(theirs)
        self.seen = b""

    def resize(self, rows: int, columns: int) -> None:
        ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def reads(self, pattern: str) -> str:
        """What stands there once this does; what comes later is for the next time."""
        until = time.monotonic() + WAIT_S
        while (found := re.search(pattern.encode(), self.seen)) is None:
            if time.monotonic() > until or not select.select([self.terminal], [], [], WAIT_S)[0]:
                pytest.fail(f"{pattern} did not come: {self.seen[-500:]!r}")
            try:
                data = os.read(self.terminal, 2**16)
            except OSError:
                data = b""
            if not data:
                pytest.fail(f"{pattern} did not come before the end: {self.seen[-500:]!r}")
            self.seen += data
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text.decode()

    def restored(self) -> bool:
        """Whether the terminal is as it was."""
        return termios.tcgetattr(self.terminal) == self.before

    def leave(self) -> int:
        """Its exit code, once all that it says was read."""
        while True:
            try:
                if not (data := os.read(self.terminal, 2**16)):
                    break
            except OSError:
                break
            self.seen += data
        return self.process.wait(WAIT_S)


def test_sandbox_cli_a_program_s_output_exit_code_and_input_are_those_of_the_command(place: dict[str, str]) -> None:
    said = command(place, "run", "--", "sh", "-c", "cat; echo oh >&2; exit 7", stdin=b"\x00in\xff")
    assert (said.returncode, said.stdout, said.stderr) == (7, b"\x00in\xff", b"oh\n")
    late = command(place, "run", "--time", "0.3", "--", "sleep", "60")
    assert late.returncode == 124 and b"wall_time" in late.stderr
    assert names(place) == []


def test_sandbox_cli_an_interrupt_kills_the_program_and_its_sandbox(place: dict[str, str]) -> None:
    person = Person(place, "run", "--", "sh", "-c", "trap '' INT; echo begun; sleep 60")
    person.reads("begun")
    person.type("\x03")
    assert person.leave() == 130
    assert names(place) == []


def test_sandbox_cli_a_sandbox_that_is_kept_is_listed_looked_at_used_again_and_stopped(place: dict[str, str]) -> None:
    said = command(place, "run", "--keep", "--", "sh", "-c", r"printf 'a\033[31mred\033]0;title\007\n'; touch here")
    assert said.returncode == 0 and b"\x1b[31m" in said.stdout
    name = said.stderr.split()[1].decode()
    again = command(place, "run", "--in", name[:6], "--", "ls")
    assert again.stdout == b"here\n"
    listed = command(place, "ls").stdout.decode().splitlines()
    assert listed[0].split() == ["SANDBOX", "STATE", "AGE", "LEFT", "PROGRAMS", "WORKER"]
    assert listed[1].split()[:2] == [name, "running"]
    printed = command(place, "logs", name[:6]).stdout
    assert b"a\\x1b[31mred\\x1b]0;title\\x07\n" in printed and b"\x1b" not in printed
    assert b"exit code 0" in printed and printed.count(b"\xe2\x94\x80\xe2\x94\x80") == 2
    busy = command(place, "top", "--once").stdout.decode()
    assert busy.startswith("1 sandboxes · 0 programs") and name in busy
    assert command(place, "stop", name[:6]).stdout.decode().split() == [name]
    assert command(place, "stop", "--all").returncode == 0 and names(place) == []
    for gone in (("logs", name), ("stop", name), ("run", "--in", name, "--", "ls"), ("stop",)):
        refused = command(place, *gone)
        assert refused.returncode == 2 and refused.stderr.startswith(b"Error: "), gone


def test_sandbox_cli_a_shell_has_a_terminal_that_is_resized_interrupted_left_found_again_and_given_back(
    place: dict[str, str],
) -> None:
    person = Person(place, "shell", rows=33, columns=77)
    name = re.search("sandbox ([0-9a-f]{32})", person.reads(r"w?\$ ")).group(1)
    person.type("stty size; tty\r")
    assert "33 77" in person.reads("/dev/pts/0")
    person.resize(44, 99)
    person.process.send_signal(signal.SIGWINCH)
    person.reads(r"\$ ")
    person.type("until stty size | grep '44 99'; do :; done\r")
    person.reads(r"[\r\n]44 99")
    person.type("sh -c 'echo be\"\"gun; exec sleep 60'\r")
    person.reads("begun")
    person.type("\x03")
    person.reads(r"\$ ")
    person.type("echo code $?\r")
    person.reads("code 130")
    person.type("X=remembered\r~.")
    assert person.leave() == 0 and person.restored()
    assert f"roll-sandbox shell {name}" in person.seen.decode()
    assert names(place) == [name]
    back = Person(place, "shell", name[:8])
    back.reads("X=remembered")  # what stood there
    back.type("echo $X; vi() { printf '\\033[?1047h'; }; vi; exit 5\r")
    back.reads(r"[\r\n]remembered")
    assert back.leave() == 5 and back.restored()
    assert b"\x1b[?1047l" in back.seen
    assert command(place, "stop", "--all").returncode == 0


def test_sandbox_cli_output_without_end_neither_fills_memory_nor_delays_an_interrupt(place: dict[str, str]) -> None:
    person = Person(place, "shell")
    person.reads(r"\$ ")
    person.type("yes abcdefgh\r")
    for _ in range(200):
        os.read(person.terminal, 2**16)
    person.type("\x03")
    person.type("echo sti''ll here; exit\r")
    person.reads("still here")
    assert person.leave() == 0 and person.restored()


def test_sandbox_cli_a_signal_leaves_the_shell_running_and_the_terminal_as_it_was(place: dict[str, str]) -> None:
    person = Person(place, "shell")
    person.reads(r"\$ ")
    assert not person.restored()
    person.process.send_signal(signal.SIGTERM)
    assert person.leave() == 0 and person.restored()
    assert len(names(place)) == 1
    command(place, "stop", "--all")


def test_sandbox_cli_a_live_table_goes_with_an_interrupt_and_needs_no_terminal(place: dict[str, str]) -> None:
    person = Person(place, "top", "--every", "0.2")
    person.reads("0 sandboxes")
    person.type("\x03")
    assert person.leave() == 0 and person.restored()
    assert command(place, "top").stdout.startswith(b"0 sandboxes")


@pytest.mark.parametrize("arguments", [("ls",), ("run", "--", "true")])
def test_sandbox_cli_without_a_service_or_a_token_one_line_says_so(
    arguments: tuple[str, ...], place: dict[str, str]
) -> None:
    nobody = command({**place, "ROLL_SANDBOX_URL": "http://127.0.0.1:9"}, *arguments)
    assert nobody.returncode == 2 and b"cannot reach a sandbox service at 'http://127.0.0.1:9'" in nobody.stderr
    wrong = command({**place, "ROLL_SANDBOX_TOKEN": "roll_wrong_x"}, *arguments)
    assert wrong.returncode == 2 and b"rejected the token" in wrong.stderr
    none = command({**place, "ROLL_SANDBOX_TOKEN": ""}, *arguments)
    assert none.returncode == 2 and b"requires a token" in none.stderr


def test_sandbox_cli_a_shell_without_a_terminal_is_refused_and_a_local_one_needs_no_service(tmp_path: Path) -> None:
    if reason := missing("bubblewrap"):
        pytest.skip(reason)
    alone = {name: value for name, value in os.environ.items() if not name.startswith("ROLL_SANDBOX")}
    refused = command(alone, "shell")
    assert refused.returncode == 2 and b"a shell requires a terminal" in refused.stderr
    assert command(alone, "run", "--local", "--", "cat", stdin=b"x").stdout == b"x"
    person = Person(alone, "shell", "--local")
    person.reads(r"\$ ")
    person.type("exit 3\r")
    assert person.leave() == 3 and person.restored()


def test_sandbox_cli_keys_that_leave_are_those_at_the_beginning_of_a_line_only() -> None:
    keys = KeyFilter()
    assert (keys.feed(b"a~.b\r"), keys.has_left) == (b"a~.b\r", False)
    assert (keys.feed(b"~"), keys.feed(b"/x\r"), keys.has_left) == (b"", b"~/x\r", False)
    assert (keys.feed(b"~~.\r"), keys.has_left) == (b"~.\r", False)
    assert (keys.feed(b"ls\r~.rest"), keys.has_left) == (b"ls\r", True)


def test_sandbox_cli_words_of_others_cannot_act_on_a_terminal() -> None:
    assert _format_table(("A", "B"), [("x\x1b[2J\n", "\u202ey")]) == "A         B\nx\\x1b[2J  \\x202ey"


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"a\x1b[1;3", b"1mred\x1b[0m\r\n"], "a\x1b[1;31mred\x1b[0m\r\n\x1b[0m"),
        ([b"50 %\r100 %\n"], "50 %\r100 %\n"),
        ([b"\x1b]52;c;cm0gLXJm\x07"], r"\x1b]52;c;cm0gLXJm\x07"),
        ([b"\x1b", b"[6n\x9b6n\xc2\x9b6n"], "\\x1b[6n\ufffd6n\\x9b6n"),
        ([b"\xe2\x80", b"\xaeabc\xff\x1b["], "\\x202eabc\ufffd\\x1b["),
        ([b"\x1b[" + b"1" * 100 + b"m"], r"\x1b[" + "1" * 100 + "m"),
    ],
    ids=["colours", "progress", "clipboard", "questions", "direction", "endless"],
)
def test_sandbox_cli_a_programs_output_does_nothing_to_a_terminal_but_lines_and_colours(
    pieces: list[bytes], shown: str
) -> None:
    terminal = TerminalFilter()
    assert "".join(map(terminal.feed, pieces)) + terminal.feed(b"", end=True) == shown
