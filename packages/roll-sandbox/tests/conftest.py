"""What all tests of this distribution share."""

from __future__ import annotations

import signal

import hypothesis

# A machine with other work is no failure, and the same code passes every time; `make explore` looks for new examples.
hypothesis.settings.register_profile("roll", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile("roll")


def pytest_configure() -> None:
    """Let Ctrl-C end the tests' processes also where a script started pytest in the background, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
