"""Every metric has a meaning, and docs/metrics.md has them all."""

import ast
import re
from pathlib import Path

import metrics_page

from roll.tracking.metric_meanings import find_meaning, list_metric_sections

ROOT = Path(__file__).parents[3]
WHOLE = re.compile(
    r"(agreement|anchors|choice|critic|data|engines|env|eval|hacking|judge|ledger|memory|replay|reward|rollout|sync"
    r"|throughput|time|training)/[a-z_0-9/]*[a-z_0-9]"
)
OF_A_LOSS = re.compile(r"(policy|mismatch|value|preference|reward_model|sft|distill|experts)/[a-z_0-9]+")


def texts(path: Path):
    """Every text in a module that stands as it is; what a formatted one inserts is listed elsewhere, name by name."""
    tree = ast.parse(path.read_text())
    formatted = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in formatted:
            yield node.value


def test_metric_meanings_every_metric_that_the_code_names_has_a_meaning():
    rooms = ["pipelines", "tracking", "weights", "rollout", "algorithms", "training", "envs/hosting.py"]
    paths = [path for room in rooms for path in [*(ROOT / "src/roll" / room).rglob("*.py"), ROOT / "src/roll" / room]]
    found = {text for path in paths if path.suffix == ".py" for text in texts(path)}
    names = {text for text in found if WHOLE.fullmatch(text)}
    names |= {f"training/{text}" for text in found if OF_A_LOSS.fullmatch(text)}
    assert len(names) > 100
    assert sorted(name for name in names if find_meaning(name) is None) == []


def test_metric_meanings_the_more_exact_family_is_found():
    assert find_meaning("reward/sums/mean").name == "reward/{domain}/mean"
    assert find_meaning("reward/sums/math").name == "reward/{domain}/{name}"
    assert find_meaning("critic/value/error").name == "critic/value/error"
    assert find_meaning("critic/grad_norm").name == "critic/{name}"
    assert find_meaning("eval/nll").name == "training/sft/nll"
    assert find_meaning("no/such") is None


def test_metric_meanings_no_metric_is_listed_twice_or_without_words():
    metrics = [metric for section in list_metric_sections() for metric in section.metrics]
    names = [metric.name for metric in metrics]
    assert len(set(names)) == len(names)
    assert all(metric.means.endswith((".", ";")) for metric in metrics)


def test_metric_meanings_the_page_is_up_to_date():
    written = (ROOT / "docs/metrics.md").read_text()
    assert written == metrics_page.page(), "run: python tools/metrics_page.py docs/metrics.md"
