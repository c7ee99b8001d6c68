"""Files of tests that need libraries beside ROLL's own, run in environments that have them: none is skipped there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from worlds.extras import extra_directory

pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
FILES = {
    "trackers": ["tests/unit/tracking/test_sinks.py"],
    "environments": ["tests/unit/envs/adapters/test_adapters.py", "tests/unit/training/test_fp8.py"],
    "verifiers": ["tests/unit/envs/adapters/test_verifiers.py"],
    "ocr": ["tests/unit/pipelines/test_diffusion_text_reward.py"],
    "checkers": ["tests/unit/test_deploy.py"],
    "megatron": ["tests/unit/training/test_megatron.py"],
    "megatron, adapters": ["tests/unit/training/test_megatron_layouts.py", "-k", "lora"],
    "megatron, context": ["tests/unit/training/test_megatron_layouts.py", "-k", "context"],
    "megatron, experts": ["tests/unit/training/test_megatron_layouts.py", "-k", "experts"],
    "megatron, contract": ["tests/unit/training/test_contract.py", "-k", "megatron"],
}
"""Arguments of pytest, by environment; what follows a comma tells several runs in one environment apart."""


@pytest.mark.parametrize("name", FILES)
def test_extras_environment_no_test_of_files_is_skipped_in_their_environment(name: str) -> None:
    directory = extra_directory(name.partition(",")[0])
    programs = directory / "bin"
    command = [programs / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *FILES[name]]
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)
    assert "SKIPPED" not in done.stdout, done.stdout[-3000:]
