"""The release script, on a small repository of its own."""

from __future__ import annotations

import datetime
import subprocess

import pytest
import release

DAY = datetime.date(2027, 1, 31)
PROJECT = '[project]\nname = "roll-rl"\nversion = "0.1.0.dev0"\ndependencies = ["rich", "roll-sandbox==0.1.0.dev0"]\n'
SANDBOX = '[project]\nname = "roll-sandbox"\nversion = "0.1.0.dev0"\n'
CHANGELOG = "# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n\n## 0.0.1 - 2026-01-01\n\n- First.\n"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose release is built by nobody."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "packages" / "roll-sandbox").mkdir(parents=True)
    (root / "packages" / "roll-sandbox" / "pyproject.toml").write_text(SANDBOX)
    (root / "CHANGELOG.md").write_text(CHANGELOG)
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "a")
        monkeypatch.setenv(f"{name}_EMAIL", "a@example.org")
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    monkeypatch.setattr(release.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(release, "_build", lambda root: [root / "pyproject.toml"])
    return root


def git(root, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def test_release_without_go_the_repository_stays_as_it_is(repository):
    before = git(repository, "rev-parse", "HEAD")
    assert release.release(repository, "0.1.0", go=False, day=DAY)
    assert git(repository, "status", "--porcelain") == "" and git(repository, "rev-parse", "HEAD") == before
    assert git(repository, "tag") == ""
    assert (repository / "pyproject.toml").read_text() == PROJECT


def test_release_with_go_version_changelog_commit_and_tag_agree(repository):
    release.release(repository, "0.1.0", go=True, day=DAY)
    project = git(repository, "show", "v0.1.0:pyproject.toml")
    assert 'version = "0.1.0"\n' in project and '"roll-sandbox==0.1.0"' in project
    assert 'version = "0.1.0"\n' in git(repository, "show", "v0.1.0:packages/roll-sandbox/pyproject.toml")
    heading = "## Unreleased\n\n## 0.1.0 - 2027-01-31\n"
    assert git(repository, "show", "v0.1.0:CHANGELOG.md") == CHANGELOG.replace("## Unreleased\n", heading)
    assert git(repository, "status", "--porcelain") == ""
    with pytest.raises(release.Refusal, match="says nothing under"):
        release.release(repository, "0.2.0", go=True, day=DAY)


@pytest.mark.parametrize("version", ["0.1.0.dev0", "0.0.9", "next", "v0.1.0", "0.1.0-rc1"])
def test_release_a_version_that_is_not_newer_or_not_written_so_is_refused(repository, version):
    with pytest.raises(release.Refusal):
        release.release(repository, version, go=True, day=DAY)


def test_release_changes_and_a_tag_stand_in_the_way_and_are_both_named(repository):
    git(repository, "tag", "v0.1.0")
    (repository / "CHANGELOG.md").write_text(CHANGELOG + "\n")
    with pytest.raises(release.Refusal, match=r"has changes: commit them first; the tag v0\.1\.0 exists"):
        release.release(repository, "0.1.0", go=True, day=DAY)
