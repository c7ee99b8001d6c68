"""Rejects reward models and other classifiers, based on a model's files, where a language model is needed."""

from __future__ import annotations

from pathlib import Path

from roll.errors import ModelError
from roll.models.directory import list_weight_files, read_tensor_headers
from roll.models.sizes import read_config

__all__ = ["check_can_generate"]

_SCORER_CLASSES = ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "RewardModel")


def check_can_generate(directory: Path, name: str) -> None:
    """Reject a reward model or another classifier, which cannot generate text.

    If the embeddings are tied, `transformers` silently loads such a model as a language model that generates
    meaningless text.

    Args:
        directory: The directory of the model.
        name: The name of the model as given by the user, for messages.

    Raises:
        ModelError: the model is a reward model or another classifier.
    """
    architectures = read_config(directory).get("architectures")
    kind = architectures[0] if isinstance(architectures, list) and architectures else None
    if isinstance(kind, str) and kind.endswith(_SCORER_CLASSES):
        reason = f"its config.json names {kind}"
    elif "score.weight" in read_tensor_headers(list_weight_files(directory)):
        reason = "its files contain score.weight"
    else:
        return
    raise ModelError(
        f"'{name}' is a reward model ({reason}): it scores text but cannot generate it. Use a language model; a reward "
        "of type reward_model can score answers with this model."
    )
