"""The skills for coding agents: each command in their blocks runs, in the order of the page."""

import shutil

import pytest
from docs.pages import ROOT, blocks

from roll.cli.main import run as command

pytestmark = pytest.mark.integration

SKILLS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "skills").rglob("SKILL.md"))
SMALL = ["inference.engine=hf", "evaluation.num_prompts=1", "rollout.max_new_tokens=4"]
TRAINS = {"train", "eval", "resume"}


@pytest.mark.parametrize("page", SKILLS)
def test_skills_commands_run(page, tmp_path, tiny_model, monkeypatch, capsys):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    commands = [words for block in blocks() if block.page == page for words in block.commands]
    assert len(commands) >= 8
    for words in commands:
        changes = SMALL if words[1] in TRAINS else []
        model = [f"model={tiny_model}", "algorithm.filters.skip_zero_variance=false"]
        of_file = model if "examples/quickstart.yaml" in words and changes else []
        words = [str(tiny_model) if word == "smollm2-135m-instruct" else word for word in words]
        found = command([*words[1:], *changes, *of_file])
        assert found == 0, f"{' '.join(words)}: {capsys.readouterr()}"
