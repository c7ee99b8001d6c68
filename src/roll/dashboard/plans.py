"""Results of `roll plan` and `roll simulate` for a run: the response of `/plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.errors import RunDirectoryError
from roll.tracking.reading.files import SafeDirectory, parse_json

__all__ = ["read_plans"]

_MAX_FILE_BYTES = 2**20
_MAX_FILES = 50
"""Maximum number of files of one directory."""
_PLAN_DIRECTORIES = ((), ("calibration",), ("simulation",), ("plan",))


def read_plans(run_dir: SafeDirectory, path: str) -> dict[str, Any]:
    """Build the response of `/plan` from the results of `roll plan` and `roll simulate` in the run's directory.

    Without results, the response says how to create them.

    Args:
        run_dir: The run's directory.
        path: The run's path, for the instructions.
    """
    items: list[dict[str, Any]] = []
    for parts in _PLAN_DIRECTORIES:
        names = run_dir.list_stamps(*parts)
        for name in sorted(names)[:_MAX_FILES]:
            try:
                if name == "results.json":
                    items += _build_simulation_table(
                        "/".join((*parts, name)), run_dir.read(*parts, name, limit=_MAX_FILE_BYTES)
                    )
                elif name in ("plan.txt", "plan.md") or (parts == ("calibration",) and name.endswith(".yaml")):
                    text = run_dir.read(*parts, name, limit=_MAX_FILE_BYTES).decode("utf-8", "replace")
                    kind = "plan" if name.startswith("plan") else "simulate"
                    items.append({"name": "/".join((*parts, name)), "kind": kind, "text": text})
            except RunDirectoryError:
                continue
    if items:
        return {"items": items}
    return {
        "problem": f"This run has no plan and no simulation. `roll simulate --calibrate {path}` fits the simulator to "
        "the run and writes calibration/workload.yaml. The results of `roll simulate` for this file with "
        f"`output_dir={path} name=simulation`, or of `roll plan … > {path}/plan.txt`, are shown here."
    }


def _build_simulation_table(name: str, content: bytes) -> list[dict[str, Any]]:
    try:
        variants = parse_json(content)["variants"]
        rows = [
            [name, *_get_confidence_interval(one.get("step_s")), *_get_confidence_interval(one.get("speed_up"))]
            for name, one in variants.items()
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
    columns = ["variant", "step, s", "±", "times as fast", "±"]
    predicted = {"time/step_s": rows[0][1]} if rows and isinstance(rows[0][1], int | float) else {}
    return [{"name": name, "kind": "simulate", "table": {"columns": columns, "rows": rows}, "predicted": predicted}]


def _get_confidence_interval(values: Any) -> list[Any]:
    """Return the mean and half-width of a confidence interval in `results.json`; `None` for missing numbers."""
    found = values if isinstance(values, Mapping) else {}
    return [value if isinstance(value, int | float) else None for value in (found.get("mean"), found.get("half"))]
