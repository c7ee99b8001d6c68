"""Messages between client, server and worker of the sandbox service.

`frames` encodes messages as bytes. `client_messages` and `worker_messages` validate received messages. `programs`,
`reports` and `error_messages` convert objects to messages and back. `json_documents` parses JSON from untrusted peers.
`outbox` queues messages until they are sent.
"""

from __future__ import annotations

from roll_sandbox.wire.client_messages import check_name, validate_client_message
from roll_sandbox.wire.error_messages import error_from_json, error_to_json
from roll_sandbox.wire.frames import MAX_MESSAGE_BYTES, Message, decode, encode
from roll_sandbox.wire.json_documents import check_json_bounds, parse_json
from roll_sandbox.wire.outbox import Outbox
from roll_sandbox.wire.programs import program_from_json, program_to_json, spec_from_json, spec_to_json
from roll_sandbox.wire.reports import MAX_POOLS, WorkerReport, compute_heartbeat_s, report_from_json, report_to_json
from roll_sandbox.wire.worker_messages import validate_worker_message

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MAX_POOLS",
    "Message",
    "Outbox",
    "WorkerReport",
    "check_json_bounds",
    "check_name",
    "compute_heartbeat_s",
    "decode",
    "encode",
    "error_from_json",
    "error_to_json",
    "parse_json",
    "program_from_json",
    "program_to_json",
    "report_from_json",
    "report_to_json",
    "spec_from_json",
    "spec_to_json",
    "validate_client_message",
    "validate_worker_message",
]
