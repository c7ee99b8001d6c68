"""The shell commands on the page of the sandbox service, run against a real one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from docs.pages import blocks
from sandbox.conftest import missing, served

PAGE = "docs/sandbox-service.md"


@pytest.mark.integration
def test_docs_sandbox_curl_sandbox_page_commands_of_curl_do_what_the_page_says(tmp_path: Path) -> None:
    for program in ("bash", "curl", "jq"):
        if shutil.which(program) is None:
            pytest.skip(f"'{program}' is not installed")
    if reason := missing("service"):
        pytest.skip(reason)
    (block,) = [block for block in blocks() if block.page == PAGE and "curl" in block.text]
    url = "http://127.0.0.1:8741"
    assert block.text.count(url) == 1
    with served(tmp_path, "--warm", "0") as (address, token):
        script = "set -e\n" + block.text.replace(url, address) + '\necho "left: $(ask "$URL/v1/sandboxes")"\n'
        environment = {"PATH": os.environ["PATH"], "TOKEN": token, "NO_PROXY": "127.0.0.1"}
        found = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, timeout=60)
        assert (found.returncode, found.stderr) == (0, "")
        assert found.stdout.splitlines() == ["42", "", "hello", "", "left: []"]

        wrong = {**environment, "TOKEN": "wrong"}
        refused = subprocess.run(["bash"], input=script, env=wrong, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0 and "401" in refused.stderr
