"""JSON Schema of the configuration file, for completion and checks in editors.

Put `# yaml-language-server: $schema=roll.schema.json` on a file's first line.
"""

from __future__ import annotations

from typing import Any

from roll.config.pipelines import DEFAULT_PIPELINE, PIPELINES

__all__ = ["build_json_schema"]


def build_json_schema(pipeline: str = DEFAULT_PIPELINE) -> dict[str, Any]:
    """Build the JSON Schema (draft 2020-12) of a pipeline's configuration file, with short forms such as `model: NAME`.

    Raises:
        ConfigError: the pipeline does not exist.
    """
    schema = PIPELINES.get(pipeline).model_json_schema(mode="validation")
    properties = schema["properties"]
    if "model" in properties:
        written_out = {"$ref": properties["model"].pop("$ref")}
        properties["model"]["anyOf"] = [{"type": "string", "minLength": 1}, written_out]
    if "judge" in properties:
        properties["judge"]["anyOf"].insert(0, {"type": "string", "minLength": 1})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
