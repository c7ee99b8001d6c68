"""`docs/metrics.md`, written from the registry of metrics:  python tools/metrics_page.py docs/metrics.md"""

from __future__ import annotations

import sys
from pathlib import Path

from roll.tracking.metric_meanings import metric_sections

__all__ = ["page"]

_HEAD = """\
# Metrics

*Written from `src/roll/tracking/metrics.yaml`: change it there.*

A run writes one JSON object per line to `metrics.jsonl`: `step`, `kind` (`train` or `eval`), and the metrics
by name. TensorBoard and the other trackers receive the same names and values. In Python:

```python
import json
from pathlib import Path

from roll.tracking.metric_meanings import meaning_of

for line in Path("runs/quickstart/metrics.jsonl").read_text().splitlines():
    for name, value in json.loads(line).items():
        meaning = meaning_of(name)
        print(name, value, meaning.unit if meaning else "")
```

`{domain}`, `{name}` and similar parts are placeholders for a source's domain, a reward's component, and so on. The last
column describes bad values and their remedy.
"""


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    for section in metric_sections():
        lines += [f"## {section.title}", "", section.about, ""]
        lines += ["| metric | unit | meaning | bad values |", "|---|---|---|---|"]
        for metric in section.metrics:
            names = ", ".join(f"`{name}`" for name in metric.names)
            lines.append(f"| {names} | {metric.unit or '-'} | {metric.means} | {metric.bad} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
