"""Send requests made from the OpenAPI of `roll sandbox serve`, and show what answers with 5xx or not as it says.

    make bench NAME=fuzz-sandbox-service ARGS="--requests 20000"

Needs schemathesis (`pip install schemathesis`), which is no requirement of the project.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any

import hypothesis
import requests
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

_CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
_ROLL = [sys.executable, "-c", "from roll_rl import main; main()", "sandbox"]


def main() -> int:
    """Exit code 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    asked = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as directory:
        database = ["--database", f"sqlite:///{directory}/db"]
        make = [*_ROLL, "token", "create", "fuzz", "--scope", "admin", *database]
        token = subprocess.run(make, check=True, capture_output=True, text=True).stdout.strip()
        serve = [*_ROLL, "serve", "--port", "0", "--warm", "4", "--owner-sandboxes", "8", *database]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                return _fuzz(process.stdout.readline().split()[-1], token, asked)
            finally:
                process.terminate()


def _fuzz(url: str, token: str, asked: int) -> int:
    session = requests.Session()
    session.headers["Authorization"] = f"Bearer {token}"
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=dict(session.headers))
    operations = [found.ok() for found in schema.get_all_operations()]
    sent: Counter[int] = Counter()
    failures: dict[str, str] = {}
    seed = 0
    while sum(sent.values()) < asked:
        each = -(-(asked - sum(sent.values())) // len(operations))
        for number, operation in enumerate(operations):
            alive = _fresh(session, url, f"fuzzed-{seed}-{number}")
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                _send(session, operation, mode, -(-each // 2), seed, alive, sent, failures)
            print(f"{operation.label}: {sum(sent.values()):,} requests so far, {len(failures)} findings", flush=True)
        seed += 1
    for failure in failures.values():
        print("\n" + failure)
    print(f"\n{sum(sent.values()):,} requests: {dict(sorted(sent.items()))}; {len(failures)} findings")
    return 1 if failures else 0


def _send(
    session: requests.Session,
    operation: Any,
    mode: schemathesis.GenerationMode,
    number: int,
    seed: int,
    alive: str,
    sent: Counter[int],
    failures: dict[str, str],
) -> None:
    """Requests of one kind: right ones or wrong ones."""
    kept = operation.path.endswith(("/stop", "/delete", "/extend")) or operation.method.upper() == "DELETE"

    def attempt(case: schemathesis.Case) -> None:
        if not kept and "name" in (case.path_parameters or {}):
            case.path_parameters["name"] = alive
        if not kept and isinstance(case.body, dict) and "sandbox_id" in case.body:
            case.body["sandbox_id"] = alive
        try:
            response = case.call(session=session, timeout=60)
            sent[response.status_code] += 1
            case.validate_response(response, checks=_CHECKS)
        except (Exception, FailureGroup) as error:  # whatever it is, it is shown, and the next one is sent
            failures.setdefault(f"{operation.label}: {''.join(filter(str.isalpha, str(error)))[:200]}", str(error))

    settings = hypothesis.settings(
        max_examples=number, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    strategy = operation.as_strategy(generation_mode=mode)
    with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing about it can be wrong
        hypothesis.seed(seed)(settings(hypothesis.given(case=strategy)(attempt)))()


def _fresh(session: requests.Session, url: str, name: str) -> str:
    """One sandbox, alive, and no other: most requests are about this one."""
    for each in session.get(f"{url}/v1/sandboxes", timeout=60).json():
        session.delete(f"{url}/v1/sandboxes/{each['sandbox']}", timeout=60)
    session.post(f"{url}/v1/sandboxes", json={}, headers={"Idempotency-Key": name}, timeout=60).raise_for_status()
    return name


if __name__ == "__main__":
    sys.exit(main())
