"""Arrow schemas of the tables of a recorded step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["build_schemas"]


def build_schemas() -> dict[str, pa.Schema]:
    """Return the schema of each table by name. `logprobs` and `policy_versions` align with `token_ids`."""
    import pyarrow as pa

    name, tokens = pa.dictionary(pa.int32(), pa.string()), pa.list_(pa.int32())
    branch = pa.struct([("start", pa.int32()), ("context", tokens), ("media", _build_media_type())])
    turn = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("reward", pa.float64()), ("state", pa.string())])
    experts = pa.struct([("dtype", pa.string()), ("shape", tokens), ("values", pa.binary())])
    columns: dict[str, list[tuple[str, Any]]] = {
        "groups": [
            ("purpose", name),
            ("draw_id", pa.int64()),
            ("uid", pa.string()),
            ("domain", name),
            ("position", pa.int64()),
            ("prompt_token_ids", tokens),
            ("media", _build_media_type()),
        ],
        "rollouts": [
            ("purpose", name),
            ("draw_id", pa.int64()),
            ("index", pa.int32()),
            ("prompt_token_ids", tokens),
            ("token_ids", tokens),
            ("logprobs", pa.list_(pa.float32())),
            ("policy_versions", tokens),
            ("finish_reason", name),
            ("text", pa.string()),
            ("status", name),
            ("cause", pa.string()),
            ("reward", pa.float64()),
            ("components", pa.map_(pa.string(), pa.float64())),
            ("verdict", pa.string()),
            ("correct", pa.bool_()),
            ("decisions", pa.map_(pa.string(), pa.bool_())),
            ("timed_out", pa.list_(pa.string())),
            ("reward_duration_s", pa.float64()),
            ("engine_id", name),
            ("turns", pa.list_(turn)),
            ("branches", pa.list_(branch)),
            ("counts", pa.map_(pa.string(), pa.int64())),
            ("experts", pa.list_(experts)),
            ("prompt_media", _build_media_type()),
            ("media", _build_media_type()),
        ],
        "moves": [
            ("time_s", pa.float64()),
            ("rollout_id", pa.string()),
            *((column, name) for column in ("before", "after", "detail")),
        ],
        "requests": [
            ("request_id", pa.string()),
            ("engine_id", name),
            *((column, pa.float64()) for column in ("queued_s", "started_s", "ended_s")),
            *((column, pa.int32()) for column in ("num_prompt", "num_tokens")),
            ("finish_reason", name),
        ],
    }
    return {table: pa.schema(fields) for table, fields in columns.items()}


def _build_media_type() -> pa.DataType:
    """Return the type of a list of `MediaSpan`."""
    import pyarrow as pa

    place = [("start", pa.int32()), ("end", pa.int32()), ("grid", pa.list_(pa.int32()))]
    return pa.list_(pa.struct([("kind", pa.string()), ("digest", pa.string()), *place]))
