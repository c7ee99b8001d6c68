"""Every configuration, or part of one, in the documentation is valid."""

import re
from typing import Any

import pytest
from docs.pages import PAGES, ROOT, Block, blocks

from roll.config.document import parse
from roll.config.keys import iterate_keys
from roll.config.load import load_config
from roll.config.pipelines import PIPELINES
from roll.config.simulation import load_simulation
from roll.errors import ConfigError

PROMPTS = [{"source": "arithmetic", "reward": "math"}]
ROWS = [{"source": "file", "path": "rows.jsonl"}]
COMMON = {"name": "documented", "model": {"path": "some/model"}}
REST: dict[str, dict[str, Any]] = {
    "rlvr": {"data": PROMPTS, "training": {"num_steps": 100}},
    "sft": {"data": ROWS},
    "preference": {"data": ROWS},
    "reward_model": {"data": ROWS},
    "distill_offline": {"data": ROWS, "teacher": "other/model"},
    "distill": {"data": PROMPTS, "training": {"num_steps": 100}, "teacher": "other/model"},
    "preference_online": {"data": PROMPTS, "training": {"num_steps": 100}},
    "rejection_sampling": {"data": PROMPTS, "training": {"num_steps": 100}},
    "diffusion": {
        "data": [{"path": "rows.jsonl"}],
        "algorithm": {"type": "flow_grpo"},
        "rewards": [{"function": "rewards.py:score"}],
        "training": {"num_steps": 100},
    },
    "agentic": {
        "environments": [{"environment": "game:GuessTheNumber-v0-easy", "num_turns": 4}],
        "training": {"num_steps": 100},
    },
}
"""What a part of a configuration leaves out, by pipeline."""
YAML = [pytest.param(block, id=str(block)) for block in blocks("yaml")]


def with_rest(tree: dict[str, Any], pipeline: str) -> dict[str, Any]:
    base = {"pipeline": pipeline} | COMMON | REST[pipeline]
    both = base.keys() & tree.keys()
    merged = {key: base[key] | tree[key] for key in both if isinstance(base[key], dict) and isinstance(tree[key], dict)}
    return base | tree | merged


def shortest(problems: dict[str, str]) -> str:
    """What the pipeline says that comes nearest."""
    return min(problems.values(), key=lambda text: ("unknown key" in text, len(text)))


def test_docs_configurations_there_is_a_rest_for_every_pipeline():
    assert set(REST) == set(PIPELINES)
    assert all(load_config(with_rest({}, pipeline)) for pipeline in REST)


@pytest.mark.parametrize("block", YAML)
def test_docs_configurations_a_configuration_is_valid(block: Block, tmp_path):
    tree, _ = parse(block.text, str(block))
    if "device" in tree:
        (tmp_path / "simulation.yaml").write_text(block.text)
        assert load_simulation(tmp_path / "simulation.yaml")
        return
    if set(tree) == {"reward"}:  # of a source
        tree = {"data": [PROMPTS[0] | tree]}
    problems = {}
    for pipeline in [tree["pipeline"]] if "pipeline" in tree else REST:
        try:
            load_config(with_rest(tree, pipeline))
        except ConfigError as error:
            problems[pipeline] = str(error)
        else:
            return
    pytest.fail(f"{block} is valid in no pipeline:\n{shortest(problems)}")


OTHER_KEYS = ("docs/migration.md", "docs/simulation.md", "docs/benchmarks/simulation.md")
"""Pages about the keys of other libraries, and of simulations."""


@pytest.mark.parametrize("page", [name for page in PAGES if (name := str(page.relative_to(ROOT))) not in OTHER_KEYS])
def test_docs_configurations_a_key_that_the_text_names_is_one(page):
    known = {
        ".".join(key.path[:depth])
        for pipeline in PIPELINES
        for key in iterate_keys(PIPELINES.get(pipeline))
        for depth in range(1, len(key.path) + 1)
    }
    known |= {key.replace(".N.", ".") for key in known}  # `teacher.backend`, of each
    sections = {key for key in known if "." not in key} - {"name", "data", "pipeline"}
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^## Former names.*?(?=^## )", "", text, flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`([a-z_]+(?:\.[a-z0-9_N]+)+)(?:: [^`]*|=[^`]*)?`", text))
    odd = {key for key in named if key.split(".")[0] in sections and re.sub(r"\.\d+", ".N", key) not in known}
    rooms = {key for key in odd if (ROOT / "src/roll" / key.replace(".", "/")).is_dir()}
    assert sorted(key for key in odd - rooms if not key.endswith((".py", ".c", ".md", ".json"))) == []


@pytest.mark.parametrize("path", sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.yaml")))
def test_docs_configurations_an_example_is_valid(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load_config(path)
