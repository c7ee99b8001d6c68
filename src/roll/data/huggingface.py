"""Prompts from a Hugging Face dataset: a directory or a hub id, through `datasets`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.config.data import HuggingFaceData
from roll.data.rows import prompt_of_row, split_held_out
from roll.errors import DataError
from roll.registry import nearest
from roll.types import Prompt

__all__ = ["huggingface_prompts"]


def huggingface_prompts(config: HuggingFaceData, domain: str, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts of a split, or of a split each.

    Raises:
        DataError: the dataset or the split is not there, or a row lacks a column.
    """
    prompts = _read(config, config.split, domain, "")
    if config.held_out_split is None:
        return split_held_out(prompts, config.held_out, seed)
    return prompts, _read(config, config.held_out_split, domain, "held_out/")


def _read(config: HuggingFaceData, split: str, domain: str, prefix: str) -> list[Prompt]:
    rows = _load(config, split)
    prompts: list[Prompt] = []
    for number, row in enumerate(rows, start=1):
        if config.limit is not None and number > config.limit:
            break
        where = f"dataset '{config.path}', split '{split}', row {number}"
        prompts.append(prompt_of_row(config, domain, row, f"{prefix}{number}", where))
    if not prompts:
        raise DataError(f"dataset '{config.path}', split '{split}' holds no rows.")
    return prompts


def _load(config: HuggingFaceData, split: str) -> Any:
    import datasets

    try:
        if _saved_to_disk(Path(config.path)):
            loaded = datasets.load_from_disk(config.path)
        else:
            loaded = datasets.load_dataset(config.path, name=config.name)
    except (
        Exception
    ) as error:  # `datasets` raises what its readers and the network raise; all of it is the user's source
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"dataset '{config.path}' cannot be loaded: {first} Give a directory (of `save_to_disk`, or with data files) "
            "or a hub id that this machine can reach."
        ) from error
    if not isinstance(loaded, Mapping):
        return loaded  # a single split was saved: it serves as whichever is asked for
    if split not in loaded:
        raise DataError(
            f"dataset '{config.path}' has no split '{split}'.{nearest(split, list(loaded))} It has: {', '.join(loaded)}."
        )
    return loaded[split]


def _saved_to_disk(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in ("dataset_dict.json", "state.json"))
