"""The check that a model predicts the next token and is not one that scores texts, from its files."""

from __future__ import annotations

from pathlib import Path

from roll.errors import ModelError
from roll.models.directory import stored_tensors, weight_files
from roll.models.sizes import read_config

__all__ = ["check_generates"]

_SCORERS = ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "RewardModel")


def check_generates(directory: Path, name: str) -> None:
    """Reject a reward model or another classifier where text is to be generated.

    With tied embeddings `transformers` silently loads such a model as a language model, which then generates text that
    it was not trained for.

    Args:
        directory: The directory of the model.
        name: The name of the model, as its user wrote it.

    Raises:
        ModelError: the model scores texts.
    """
    architectures = read_config(directory).get("architectures")
    kind = architectures[0] if isinstance(architectures, list) and architectures else None
    if isinstance(kind, str) and kind.endswith(_SCORERS):
        found = f"its config.json names {kind}"
    elif "score.weight" in stored_tensors(weight_files(directory)):
        found = "its files hold score.weight"
    else:
        return
    raise ModelError(
        f"'{name}' is a reward model ({found}): it scores texts but cannot generate them. Use a language model here; a "
        "reward of type reward_model can score answers with this model."
    )
