"""Build the environments of `make test-extras`: libraries and programs that ROLL's own environment does not hold.

    requirements/extras/NAME.txt   pinned Python packages        -> .venv-extras/NAME/bin/python
    requirements/extras/NAME.json  package.json of npm packages  -> .venv-extras/NAME/node_modules/.bin

An environment may have both files. It is built once, and again when a file changes. One that cannot be built is named
with the reason, and its tests are skipped. A line `# python: 3.12` in NAME.txt asks for another Python than ROLL's own.
With a line `# on top of .venv`, NAME.txt is installed without dependencies, and what it lacks is taken from ROLL's own
environment: ROLL's tests can be run there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import uv_settings

ROOT = Path(__file__).resolve().parents[1]
STAMP = "extras.stamp"
"""In an environment that is complete: the hash of its files."""
ON_TOP = "# on top of .venv"
WRITE = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"


def names(root: Path = ROOT) -> list[str]:
    """Return the names of all environments that have a file in `requirements/extras`."""
    return sorted(
        {file.stem for file in (root / "requirements" / "extras").glob("*") if file.suffix in (".txt", ".json")}
    )


def directory(name: str, root: Path = ROOT) -> Path:
    """Return where an environment is, or will be."""
    return root / ".venv-extras" / name


def missing(name: str, root: Path = ROOT) -> str | None:
    """Return why an environment cannot be used as it is, or `None`."""
    if not (files := _files(name, root)):
        return f"there is no requirements/extras/{name}.txt"
    stamp = directory(name, root) / STAMP
    if not stamp.is_file():
        return f"the environment '{name}' is not built; `make test-extras` builds it"
    if stamp.read_text(encoding="utf-8") != _hash(files):
        return f"the environment '{name}' is older than its list of packages; `make test-extras` builds it again"
    return None


def build(name: str, root: Path = ROOT) -> str | None:
    """Build an environment from nothing.

    Returns:
        The reason why it cannot be built, or `None`.
    """
    target, log = directory(name, root), directory(name, root).with_suffix(".log")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    environment = os.environ | _pip_settings()
    try:
        with log.open("w", encoding="utf-8") as output:
            for command in _commands(_files(name, root), target):
                print("$", *command, file=output, flush=True)
                subprocess.run(command, cwd=target, env=environment, stdout=output, stderr=output, check=True)
    except FileNotFoundError as error:
        return f"the program '{error.filename}' was not found"
    except subprocess.CalledProcessError as error:
        return f"'{' '.join(error.cmd[:3])} ...' failed with {error.returncode}; see {log}"
    (target / STAMP).write_text(_hash(_files(name, root)), encoding="utf-8")
    return None


def _commands(files: list[Path], target: Path) -> list[list[str]]:
    """Return what installs the packages of the files into a directory."""
    commands: list[list[str]] = []
    for file in files:
        if file.suffix == ".json":
            shutil.copy(file, target / "package.json")
            commands.append(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"])
            continue
        text = file.read_text(encoding="utf-8")
        uv = shutil.which("uv") or str(Path(sys.prefix) / "bin" / "uv")
        install = [uv, "--no-progress", "pip", "install", "--python", str(target / "bin" / "python")]
        commands.append([uv, "venv", "--quiet", "--allow-existing", "--python", _python(file), str(target)])
        if ON_TOP in text:
            (packages,) = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
            below = f"import site; site.addsitedir({packages!r})"
            folder = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
            commands.append([sys.executable, "-c", WRITE, str(target / folder / "below.pth"), below])
            install.append("--no-deps")
        if any(line.startswith("torch==") for line in text.splitlines()):
            commands.append([*install, *_torch()])
        commands.append([*install, "-r", str(file)])
    return commands


def _python(file: Path) -> str:
    """Return the interpreter for a list of packages: ROLL's own, unless a line of the list asks for another version."""
    asked = re.search(r"^# python: (3\.\d+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    if asked is None or asked[1] == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(pyenv.glob(f"{asked[1]}.*/bin/python{asked[1]}"))
    return str(installed[-1]) if installed else shutil.which(f"python{asked[1]}") or f"python{asked[1]}"


def _torch() -> list[str]:
    """Return which build of PyTorch set-up installed, as arguments of `pip install`."""
    stamp = Path(sys.prefix) / "setup.stamp"
    lines = stamp.read_text(encoding="utf-8").splitlines() if stamp.is_file() else []
    return next((line.split()[1:] for line in lines if line.startswith("TORCH ")), ["torch"])


def _pip_settings() -> dict[str, str]:
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    return uv_settings.uv_environment(uv_settings.read_pip_settings(listing))


def _files(name: str, root: Path) -> list[Path]:
    found = [root / "requirements" / "extras" / f"{name}{suffix}" for suffix in (".txt", ".json")]
    return [file for file in found if file.is_file()]


def _hash(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def main() -> None:
    """Build the environments that are named, or all; those that are complete are left as they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="environments to build; all of them by default")
    chosen = parser.parse_args().names
    if unknown := sorted(set(chosen) - set(names())):
        parser.error(f"'{unknown[0]}' has no file in requirements/extras; known: {', '.join(names())}")
    for name in chosen or names():
        if missing(name) is None:
            continue
        print(f"Building {directory(name).relative_to(ROOT)} ...", flush=True)
        if reason := build(name):
            print(f"  NOT BUILT, its tests are skipped: {reason}", flush=True)


if __name__ == "__main__":
    main()
