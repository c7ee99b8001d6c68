"""The distribution's name, what it installs, and a namesake in the same environment."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from roll.version import DISTRIBUTION, build_install_command

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _texts():
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "examples/**/*.*", "src/**/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            if path.suffix != ".pyc":  # an example was run
                yield path, path.read_text(encoding="utf-8")


def test_distribution_the_distribution_has_a_name_of_its_own_and_the_command_and_package_are_roll():
    assert PROJECT["name"] == DISTRIBUTION == "roll-rl"
    assert PROJECT["scripts"] == {"roll": "roll_rl:main"}


def test_distribution_every_extra_that_a_text_names_belongs_to_the_distribution_and_exists():
    extras = set(PROJECT["optional-dependencies"])
    found = []
    for path, text in _texts():
        assert not re.search(r"\broll\[", text), f"{path} names the distribution 'roll', which is another project"
        assert not re.search(r"pip install\s+['\"]?roll(?!-rl|-sandbox)\b", text), f"{path} installs another project"
        found += re.findall(r"roll-rl\[([\w-]+)\]", text) + re.findall(r"build_install_command\([\"']([\w-]+)", text)
    assert {"docker", "instructions"} <= set(found)
    assert set(found) <= extras | {"name", "package"}, "extras that pyproject.toml does not have"
    assert build_install_command("docker") == "pip install 'roll-rl[docker]'"


def _environment(tmp_path: Path, *, files: str) -> Path:
    """A site directory in which a distribution called `roll` is installed."""
    info = tmp_path / "roll-0.13.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: roll\nVersion: 0.13.4\n")
    (info / "RECORD").write_text(files)
    return tmp_path


def _python(program: str, *paths: Path) -> subprocess.CompletedProcess:
    head = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}\n"
    return subprocess.run([sys.executable, "-c", head + program], capture_output=True, text=True, timeout=60)


def test_distribution_the_command_names_a_namesake_that_hides_the_package(tmp_path):
    site = _environment(tmp_path, files="roll/__init__.py,,\nroll/http.py,,\n")
    (site / "roll").mkdir()
    (site / "roll" / "__init__.py").write_text("class Roll: ...\n")
    done = _python("import roll_rl; roll_rl.main()", site, ROOT / "src")
    assert done.returncode == 2
    assert "the package 'roll' 0.13.4 is installed" in done.stderr and "pip uninstall roll" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["roll.py", "roll/__init__.py"])
def test_distribution_the_command_names_a_file_of_the_users_that_hides_the_package(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("class Roll: ...\n")
    done = _python("import roll_rl; roll_rl.main()", tmp_path, ROOT / "src")
    assert done.returncode == 2
    assert f"finds another 'roll', {path}, before ROLL's package ({ROOT}/src/roll): rename or move it" in done.stderr
    assert "Traceback" not in done.stderr


def test_distribution_the_first_use_of_the_package_names_a_namesake_whose_files_it_shares(tmp_path):
    site = _environment(tmp_path, files="roll/__init__.py,,\n")
    done = _python("import roll; roll.train", ROOT / "src", site)
    assert done.returncode != 0
    assert "ImportError: the package 'roll' 0.13.4 is installed" in done.stderr


def test_distribution_an_editable_install_under_the_former_name_is_no_namesake(tmp_path):
    site = _environment(tmp_path, files="_editable_impl_roll.pth,,\n")
    done = _python("import roll, roll_rl; print(roll_rl.namesake(), roll.load_config)", ROOT / "src", site)
    assert done.returncode == 0 and done.stdout.startswith("None <function load_config")
