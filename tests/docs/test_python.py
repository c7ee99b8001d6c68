"""Every Python block of the documentation runs as it is written, page by page, in the order of the page.

A block that begins with `# NAME.py` is also that file. What a page takes for granted is in `GIVEN`.
"""

import ast
import re
from pathlib import Path

import pytest
from docs.pages import ROOT, blocks

GIVEN = {
    "docs/tools.md": """
import random
from pathlib import Path
Path("notes").mkdir()
Path("notes/one.txt").write_text("A note about addition.")
from roll.envs.tools import ToolError
word = "word"
ask_model = lambda player, text: f"\\\\boxed{{{match.list_moves()[0]}}}"
""",
    "docs/migration.md": """
import pyarrow as pa, pyarrow.parquet
from pathlib import Path
Path("data/gsm8k").mkdir(parents=True)
rows = pa.table({"prompt": ["What is 1 + 1?"], "reward_model": [{"style": "rule", "ground_truth": "2"}]})
pa.parquet.write_table(rows, "data/gsm8k/train.parquet")
""",
    "docs/post-training.md": """
from transformers import LlamaConfig, LlamaForSequenceClassification
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
small = LlamaConfig(**sizes, vocab_size=16, num_labels=1)
LlamaForSequenceClassification(small).save_pretrained("runs/reward_model/checkpoints/step-000027/model")
""",
    "docs/sandbox-service.md": """
SandboxConfig, token = dict, "a token"  # of ROCK's SDK
""",
    "docs/metrics.md": """
from pathlib import Path
Path("runs/quickstart").mkdir(parents=True)
Path("runs/quickstart/metrics.jsonl").write_text('{"step": 1, "kind": "train", "reward/mean": 0.5}')
""",
}
TRAINING = ("roll.train(", "roll.resume(", "roll.evaluate(")
BY_PAGE: dict[str, list] = {}
for _block in blocks("python"):
    BY_PAGE.setdefault(_block.page, []).append(_block)
WHOLE_RUNS = [
    page for page, found in BY_PAGE.items() if any(call in block.text for block in found for call in TRAINING)
]
OTHERS = [page for page in BY_PAGE if page not in WHOLE_RUNS]


def run(page: str, workplace: Path) -> None:
    names: dict = {"__name__": "__documentation__"}
    exec(GIVEN.get(page, ""), names)
    for block in BY_PAGE[page]:
        first = block.text.splitlines()[0]
        if first.startswith("# ") and first.endswith(".py"):
            (workplace / first[2:]).write_text(block.text)
        code = compile(block.text, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        exec(code, names)


def test_docs_python_every_python_block_is_python():
    for block in blocks("python"):
        compile(block.text, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_docs_python_every_file_that_a_block_includes_is_there():
    included = [name for block in blocks() for name in re.findall(r'--\s*8\s*<.*"(.*)"', block.text)]
    assert included
    assert [name for name in included if not (ROOT / name).is_file()] == []
    assert all('--8<-- "' in block.text for block in blocks() if "8<" in block.text or "8 <" in block.text)


@pytest.mark.parametrize("page", OTHERS)
def test_docs_python_the_blocks_of_a_page_run(page, workplace):
    run(page, workplace)


@pytest.mark.slow
@pytest.mark.parametrize("page", WHOLE_RUNS)
def test_docs_python_the_runs_of_a_page_run(page, workplace):
    run(page, workplace)
