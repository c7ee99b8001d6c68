"""Messages between client, server and worker of the sandbox service.

`frames` encodes a message as bytes. `messages`, `news`, `programs`, `reports` and `failures` convert records to
messages and check what arrives. `documents` reads JSON from untrusted peers. `outbox` holds messages until they are
sent.
"""

from __future__ import annotations

from roll_sandbox.wire.documents import check_values, parsed
from roll_sandbox.wire.failures import failure_of, failure_said
from roll_sandbox.wire.frames import MAX_MESSAGE_BYTES, Message, decode, encode
from roll_sandbox.wire.messages import check_name, checked
from roll_sandbox.wire.news import heard
from roll_sandbox.wire.outbox import Outbox
from roll_sandbox.wire.programs import program_of, program_said, spec_of, spec_said
from roll_sandbox.wire.reports import MOST_POOLS, Report, beat_s, report_of, report_said

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MOST_POOLS",
    "Message",
    "Outbox",
    "Report",
    "beat_s",
    "check_name",
    "check_values",
    "checked",
    "decode",
    "encode",
    "failure_of",
    "failure_said",
    "heard",
    "parsed",
    "program_of",
    "program_said",
    "report_of",
    "report_said",
    "spec_of",
    "spec_said",
]
