"""What ROLL exports, read with transformers 4 in an environment of its own."""

import subprocess

import pytest
from worlds.extras import extra_python

pytestmark = pytest.mark.extras


def test_extras_have_the_pinned_transformers_4():
    code = "import torch, transformers; print(transformers.__version__)"
    done = subprocess.run([extra_python("transformers-4"), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0].startswith("4.57.")
