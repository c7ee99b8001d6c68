"""JSON Schema of the configuration file, for completion and checks in editors.

Put `# yaml-language-server: $schema=roll.schema.json` on a file's first line.
"""

from __future__ import annotations

from typing import Any

from roll.config.base import Section
from roll.config.run import RLVRConfig

__all__ = ["json_schema"]


def json_schema(model: type[Section] = RLVRConfig) -> dict[str, Any]:
    """The schema (draft 2020-12) of a configuration file, short forms such as `model: NAME` included."""
    schema = model.model_json_schema(mode="validation")
    properties = schema["properties"]
    if "model" in properties:
        written_out = {"$ref": properties["model"].pop("$ref")}
        properties["model"]["anyOf"] = [{"type": "string", "minLength": 1}, written_out]
    if "judge" in properties:
        properties["judge"]["anyOf"].insert(0, {"type": "string", "minLength": 1})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
