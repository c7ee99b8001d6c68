"""Releases a version: sets it, closes its section of the changelog, builds, checks, commits and tags.

    .venv/bin/python tools/release.py 0.2.0             says what it would do, and builds and checks in a copy
    .venv/bin/python tools/release.py 0.2.0 --go        does it; publishing stays with you: it prints the commands

It refuses a version that is not newer, a tree with changes, a tag that exists, and an empty changelog. It needs
`pip install build twine`, and the tests are yours to run before: `make lint test test-wheel`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
UNRELEASED = "## Unreleased"
PROJECTS = ("pyproject.toml", "packages/roll-sandbox/pyproject.toml")
"""Of both distributions, which are released together, by one version."""
_VERSION = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)
_SECTION = re.compile(r"^## Unreleased\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


class Refusal(Exception):
    """A release that must not be made."""


def with_version(project: str, new: str) -> str:
    """The text of pyproject.toml with another version, and that one of roll-sandbox where it asks for it.

    Raises:
        Refusal: `new` is not newer than the one that stands there, or is no version.
    """
    found = _VERSION.search(project)
    if found is None:
        raise Refusal('pyproject.toml has no line `version = "…"`')
    try:
        newer = Version(new) > Version(found[1])
    except InvalidVersion as error:
        raise Refusal(f"{error}: write it as 0.2.0 or 0.2.0rc1") from None
    if not newer or str(Version(new)) != new:
        raise Refusal(f"{new} is not newer than {found[1]}, or is written otherwise than {Version(new)}")
    changed = project[: found.start(1)] + new + project[found.end(1) :]
    return changed.replace(f'"roll-sandbox=={found[1]}"', f'"roll-sandbox=={new}"')


def with_section(changelog: str, new: str, day: datetime.date) -> str:
    """The changelog with what is unreleased as the section of a version, and an empty one above it.

    Raises:
        Refusal: nothing is unreleased.
    """
    found = _SECTION.search(changelog)
    if found is None or not re.search(r"^- ", found[1], re.MULTILINE):
        raise Refusal(f"CHANGELOG.md says nothing under `{UNRELEASED}`")
    heading = f"{UNRELEASED}\n\n## {new} - {day.isoformat()}\n"
    return changelog[: found.start()] + heading + found[1] + changelog[found.end() :]


def obstacles(root: Path, tag: str) -> Iterator[str]:
    """What of the work tree stands in the way."""
    if _output("git", "status", "--porcelain", "--untracked-files=no", cwd=root):
        yield "the work tree has changes: commit them first"
    if _output("git", "tag", "--list", tag, cwd=root):
        yield f"the tag {tag} exists"
    if not _output("git", "branch", "--show-current", cwd=root):
        yield "HEAD is on no branch"
    for module in ("build", "twine"):
        if importlib.util.find_spec(module) is None:
            yield f"'{module}' is not installed: pip install {module}"


def _output(*command: str, cwd: Path) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


def _build(root: Path) -> list[Path]:
    """Build sdists and wheels of both distributions into an empty dist/, and have twine check them."""
    dist = root / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for project in PROJECTS:
        command = [sys.executable, "-m", "build", "--outdir", dist, (root / project).parent]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    files = sorted(dist.iterdir())
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    return files


def release(root: Path, new: str, *, go: bool, day: datetime.date) -> list[Path]:
    """Make the release in the repository at `root`; without `go` in a copy, of which nothing stays.

    Returns:
        The files that were built.

    Raises:
        Refusal: it must not be made.
    """
    tag = f"v{new}"
    texts = {name: with_version((root / name).read_text(), new) for name in PROJECTS}
    texts["CHANGELOG.md"] = with_section((root / "CHANGELOG.md").read_text(), new, day)
    found = list(obstacles(root, tag))
    if found:
        raise Refusal("; ".join(found))
    if not go:
        with tempfile.TemporaryDirectory(prefix="roll-release-") as place:
            copy = Path(place) / "copy"
            subprocess.run(["git", "clone", "--quiet", "--depth", "1", root.as_uri(), copy], check=True)
            return _write_and_build(copy, texts)
    files = _write_and_build(root, texts)
    subprocess.run(["git", "commit", "--quiet", "-m", f"Release {new}", *texts], cwd=root, check=True)
    subprocess.run(["git", "tag", "--annotate", "-m", f"ROLL {new}", tag], cwd=root, check=True)
    return files


def _write_and_build(root: Path, texts: Mapping[str, str]) -> list[Path]:
    for name, text in texts.items():
        (root / name).write_text(text)
    return _build(root)


def main(arguments: list[str] | None = None) -> int:
    """The command; the exit code is 2 where the release is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="of the release, such as 0.2.0")
    parser.add_argument("--go", action="store_true", help="do it: without, the repository stays as it is")
    given = parser.parse_args(arguments)
    try:
        files = release(ROOT, given.version, go=given.go, day=datetime.date.today())
    except Refusal as refusal:
        print(f"Not released: {refusal}.", file=sys.stderr)
        return 2
    names = ", ".join(path.name for path in files)
    if not given.go:
        print(f"{names} would be released as v{given.version}. Nothing was changed; do it with --go.")
        return 0
    print(f"{names} are in dist/, the commit is tagged v{given.version}. To publish:")
    print(f"  git push --follow-tags\n  {Path(sys.executable).name} -m twine upload dist/*")
    return 0


if __name__ == "__main__":
    sys.exit(main())
