"""Results of `roll plan` and `roll simulate` for a run: for `/plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.errors import RunDirectoryError
from roll.tracking.reading.files import SafeDirectory, from_json

__all__ = ["plans"]

_LARGEST = 2**20
_MOST_FILES = 50
"""Maximum number of files of one directory."""
_DIRECTORIES = ((), ("calibration",), ("simulation",), ("plan",))


def plans(inside: SafeDirectory, path: str) -> dict[str, Any]:
    """Return the results in the run's directory: `results.json` of a simulation, `plan.txt` of a plan, and
    calibrations.
    """
    items: list[dict[str, Any]] = []
    for parts in _DIRECTORIES:
        names = inside.stamps(*parts)
        for name in sorted(names)[:_MOST_FILES]:
            try:
                if name == "results.json":
                    items += _simulations("/".join((*parts, name)), inside.read(*parts, name, limit=_LARGEST))
                elif name in ("plan.txt", "plan.md") or (parts == ("calibration",) and name.endswith(".yaml")):
                    text = inside.read(*parts, name, limit=_LARGEST).decode("utf-8", "replace")
                    kind = "plan" if name.startswith("plan") else "simulate"
                    items.append({"name": "/".join((*parts, name)), "kind": kind, "text": text})
            except RunDirectoryError:
                continue
    if items:
        return {"items": items}
    return {
        "problem": f"This run has no plan and no simulation. `roll simulate --calibrate {path}` fits the "
        "simulator to it and writes calibration/workload.yaml; `roll simulate` of that with "
        f"`output_dir={path} name=simulation`, or `roll plan … > {path}/plan.txt`, is then shown here."
    }


def _simulations(name: str, content: bytes) -> list[dict[str, Any]]:
    try:
        variants = from_json(content)["variants"]
        rows = [[name, *_range(one.get("step_s")), *_range(one.get("speed_up"))] for name, one in variants.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
    columns = ["variant", "step, s", "±", "times as fast", "±"]
    predicted = {"time/step_s": rows[0][1]} if rows and isinstance(rows[0][1], int | float) else {}
    return [{"name": name, "kind": "simulate", "table": {"columns": columns, "rows": rows}, "predicted": predicted}]


def _range(values: Any) -> list[Any]:
    """Return the mean and half of the confidence interval (`roll.simulation.report.Interval`)."""
    found = values if isinstance(values, Mapping) else {}
    return [value if isinstance(value, int | float) else None for value in (found.get("mean"), found.get("half"))]
