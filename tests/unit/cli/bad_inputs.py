"""Bad configurations and data files by the thousand: each function breaks something that was right, at random."""

from __future__ import annotations

import copy
import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from roll.config.keys import Key, ValueType, iterate_keys
from roll.config.pipelines.rlvr import RLVRConfig

BadInput = tuple[bytes, list[str], str]
"""A configuration file's content, the overrides given with it, and what the message must name."""

FILE = "config.yaml"

BASE: dict[str, Any] = {
    "pipeline": "rlvr",
    "name": "quickstart",
    "output_dir": "runs",
    "seed": 3,
    "model": {"path": "m", "dtype": "float32", "lora": {"rank": 4, "alpha": 8.0}},
    "algorithm": {
        "type": "grpo",
        "gate": {"type": "min_clip", "low": 0.2},
        "kl": {"coefficient": 0.1, "estimator": "k3"},
    },
    "data": [
        {"source": "arithmetic", "reward": [{"type": "math", "weight": 1.0}], "operations": ["+"], "max_operand": 9},
        {"source": "file", "path": "x.jsonl", "reward": [{"type": "regex", "pattern": "a"}], "limit": 5},
    ],
    "rollout": {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 32, "temperature": 1.0},
    "inference": {"engine": "hf", "tensor_parallel": 1, "options": {"x": 1}},
    "training": {"num_steps": 40, "learning_rate": 1e-5, "warmup_steps": 2, "share_prefix": True},
    "evaluation": {"every_num_steps": 10, "num_prompts": 64},
    "weight_sync": {"transport": "auto"},
    "checkpoint": {"keep_last": 1},
    "cluster": {"type": "local", "device_mapping": {"actor_train": [0], "actor_infer": [0]}},
    "tracking": {"console": "plain", "tensorboard": True},
}

KEYS = [key for key in iterate_keys(RLVRConfig) if "options" not in key.path]
ANYTHING: list[Any] = [
    None, True, False, 0, -1, 1, 3.5, -2.5, 1e400, float("nan"), "", "x", "8", "true", "yes", [], [1], ["x"], [[]],
    {}, {"x": 1}, {"type": "y"}, 10**30, "ünïcode", "a\nb", "null", [None], {"source": "z"},
]  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all mappings in a tree, but those whose content is free."""
    here = [path] if isinstance(tree, dict) and "options" not in path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return here + [found for key, value in items for found in places(value, (*path, key))]


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def written(tree: Any) -> bytes:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode()


def misspelt(rng: random.Random, name: str) -> str:
    """A name that is no key of the configuration."""
    known = {key.path[-1] for key in KEYS}
    while True:
        position = rng.randrange(len(name))
        letter = rng.choice(string.ascii_lowercase + "_-. é")
        changed = rng.choice(
            [
                name[:position] + name[position + 1 :],
                name[:position] + letter + name[position:],
                name[::-1],
                name.upper(),
            ]
        )
        if changed and changed not in known and changed.strip():
            return changed


def unknown_key(rng: random.Random) -> BadInput:
    tree = copy.deepcopy(BASE)
    place = at(tree, rng.choice(places(tree)))
    name = rng.choice(sorted(place))
    wrong = misspelt(rng, name)
    place[wrong] = place.pop(name) if rng.random() < 0.5 else rng.choice(ANYTHING)
    return written(tree), [], wrong if wrong.isprintable() else FILE


def allows(shape: ValueType, value: Any) -> bool:
    """Whether a value could be right for a key; errs on the side of yes."""
    if value is None:
        return shape.nullable
    if shape.section or shape.variants:
        return isinstance(value, dict | str)
    if shape.is_list:
        return isinstance(value, list | str | int | dict)
    if shape.alternatives:
        return isinstance(value, list | str)
    if get_origin(shape.scalar) is not None:
        return value in get_args(shape.scalar)
    if shape.scalar is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is shape.scalar


def wrong_type(rng: random.Random) -> BadInput:
    """A key of the base configuration with a value of a type that it never has."""
    tree = copy.deepcopy(BASE)
    while True:
        path = rng.choice(places(tree))
        name = rng.choice(sorted(at(tree, path)))
        shape = shape_at((*path, name))
        value = rng.choice(ANYTHING)
        if not allows(shape, value):
            at(tree, path)[name] = value
            return written(tree), [], name


def shape_at(path: tuple[Any, ...]) -> ValueType:
    wanted = tuple("N" if isinstance(part, int) else part for part in path)
    return (
        next(key.value_type for key in KEYS if key.path == wanted)
        if wanted != ("inference", "options")
        else ValueType()
    )


LIMITED = [
    key for key in KEYS if any(word in key.type_description for word in (">= ", "> ")) and "data" not in key.path
]


def out_of_range(rng: random.Random) -> BadInput:
    key: Key = rng.choice(LIMITED)
    value = rng.choice(["-1", "-1e3", "-0.5", "-.inf", ".nan", "-999999999999999999"])
    return written(BASE), [f"{key.dotted}={value}"], f"'{key.dotted}'"


def malformed_yaml(rng: random.Random) -> BadInput:
    """A character sequence that makes any YAML invalid, at the beginning of some line."""
    lines = written(BASE).decode().splitlines()
    position = rng.randrange(len(lines) + 1)
    broken = rng.choice(
        ["\t- x: 1", "]", "}", "a: b: c: d", "'unclosed", '"unclosed', "@at: 1", "`tick`: 1", "%: %", "{a: ["]
    )
    lines.insert(position, broken)
    return "\n".join(lines).encode(), [], f"{FILE}:"


def binary_junk(rng: random.Random) -> BadInput:
    junk = rng.randbytes(rng.choice([0, 1, 10, 1000]))
    whole = written(BASE)
    position = rng.randrange(len(whole))
    return rng.choice([junk, b"\x00" + junk, whole[:position] + b"\xff\xfe" + junk + whole[position:]]), [], FILE


def duplicate_key(rng: random.Random) -> BadInput:
    lines = written(BASE).decode().splitlines()
    keyed = [i for i, line in enumerate(lines) if ":" in line and not line.lstrip().startswith("-")]
    position = rng.choice(keyed)
    indent = len(lines[position]) - len(lines[position].lstrip())
    name = lines[position].partition(":")[0].strip()
    lines.insert(position, " " * indent + f"{name}: 1")
    return "\n".join(lines).encode(), [], f"{FILE}:{position + 2}"


def bad_override(rng: random.Random) -> BadInput:
    key = rng.choice(KEYS)
    parts = key.dotted.replace(".N", ".0").split(".")
    parts[-1] = misspelt(rng, parts[-1])
    return (
        written(BASE),
        [
            rng.choice(
                [
                    ".".join(parts) + "=1",
                    key.dotted,
                    "=" + key.dotted,
                    "training.num_steps=" + rng.choice(["[", "{a", "*x", "!!python/none", "'", "- -"]),
                    f"data.{rng.randrange(3, 10**6)}.weight=1",
                    f"seed.{rng.choice(string.ascii_letters)}=1",
                    "..=1",
                    "training.=1",
                    "data.x.source=file",
                    "name=" + rng.choice(["a/b", "../x", "", "a b", "\udcff"]),
                ]
            )
        ],
        "override",
    )


def missing_key(rng: random.Random) -> BadInput:
    tree = copy.deepcopy(BASE)
    path, name = rng.choice(
        [((), "name"), ((), "model"), ((), "data"), ((), "training"), (("model",), "path"), (("data", 0), "source"),
         (("data", 1), "path"), (("data", 0), "reward"), (("training",), "num_steps"),
         (("data", 1, "reward", 0), "pattern"), (("data", 0, "reward", 0), "type")]
    )  # fmt: skip
    del at(tree, path)[name]
    return written(tree), [], f"{name}'"


def wrong_shape(rng: random.Random) -> BadInput:
    """A whole file that is YAML, and no configuration."""
    return written(rng.choice([*ANYTHING, [BASE], {"config": BASE}, {1: 2}, {None: 3}, {"a": {True: 1}}])), [], FILE


CONFIGS: list[Callable[[random.Random], BadInput]] = [
    unknown_key, wrong_type, out_of_range, malformed_yaml, binary_junk, duplicate_key, bad_override, missing_key, wrong_shape,  # noqa: E501
]  # fmt: skip


def bad_data_file(rng: random.Random, directory: Path) -> tuple[Path, dict[str, Any]]:
    """A data file with something wrong in one of its rows, and the settings it is read with."""
    rows = [json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}).encode() for i in range(5)]
    position = rng.randrange(5)
    whole = b"\n".join(rows)
    broken = rng.choice(
        [
            b"{", b"}", b"[1, 2]", b"3", b"null", b'"text"', b"{'prompt': 'x'}", b"\xff\xfe\x00", rng.randbytes(20) + b"\xff",  # noqa: E501
            b'{"prompt": "x"}', b'{"answer": "x"}', b'{"prompt": 3, "answer": "x"}', b'{"prompt": "", "answer": "x"}',
            b'{"prompt": [], "answer": "x"}', b'{"prompt": "x", "answer": null}', b'{"prompt": "x", "answer": [1]}',
            b'{"prompt": [{"role": "robot", "content": "x"}], "answer": "1"}', b'{"prompt": [{"role": "user"}], "answer": "1"}',  # noqa: E501
            rows[0][: rng.randrange(1, len(rows[0]) - 1)], rows[0] + rows[0], b"[" * 100_000,
        ]
    )  # fmt: skip
    kind = rng.choice(
        ["row", "row", "row", "row", "empty", "parquet", "suffix", "missing", "directory", "column", "pattern"]
    )
    options: dict[str, Any] = {}
    name, content = "data.jsonl", b"\n".join([*rows[:position], broken, *rows[position + 1 :]])
    match kind:
        case "empty":
            content = rng.choice([b"", b"\n\n", b"   \n"])
        case "parquet":
            name, content = "data.parquet", rng.choice([b"", whole, b"PAR1" + rng.randbytes(50) + b"PAR1"])
        case "suffix":
            name, content = rng.choice(["data.csv", "data", "data.txt"]), whole
        case "column":
            content, options = whole, {rng.choice(["prompt_key", "answer_key"]): misspelt(rng, "prompt")}
        case "pattern":
            content, options = whole, {"answer_pattern": "#### (.+)"}
    path = directory / name
    if kind == "directory":
        return directory, options
    if kind == "missing":
        return directory / "data.jsnol", options
    path.write_bytes(content)
    return path, options
