"""Generate `docs/metrics.md` from the registry of metrics:  python tools/metrics_page.py docs/metrics.md"""

from __future__ import annotations

import sys
from pathlib import Path

from roll.tracking.metric_meanings import list_metric_sections

__all__ = ["page"]

_HEAD = """\
# Metrics

*Generated from `src/roll/tracking/metrics.yaml`: change it there.*

This page lists the metrics that a run records, with the values that indicate a problem. A run writes one JSON object
per line to `metrics.jsonl`: `step`, `kind` (`train` or `evaluation`), and the metrics by name. TensorBoard and the
other trackers receive the same names and values. In Python:

```python
import json
from pathlib import Path

from roll.tracking.metric_meanings import find_meaning

for line in Path("runs/quickstart/metrics.jsonl").read_text().splitlines():
    for name, value in json.loads(line).items():
        meaning = find_meaning(name)
        print(name, value, meaning.unit if meaning else "")
```

`{domain}`, `{name}` and similar parts are placeholders, for example for the domain of a source or the name of a reward
component. The last column lists values that indicate a problem, with causes or remedies.
"""


def page() -> str:
    """Return the whole page."""
    lines = [_HEAD]
    for section in list_metric_sections():
        lines += [f"## {section.title}", "", section.about, ""]
        lines += ["| metric | unit | meaning | values that indicate a problem |", "|---|---|---|---|"]
        for metric in section.metrics:
            names = ", ".join(f"`{name}`" for name in metric.names)
            lines.append(f"| {names} | {metric.unit or '-'} | {metric.means} | {metric.bad} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
