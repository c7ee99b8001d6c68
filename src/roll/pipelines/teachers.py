"""Resolves teacher models and compares their tokenizers with the student's, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roll.config.distillation import TeacherConfig
from roll.config.model import ModelConfig
from roll.errors import ModelError
from roll.models import load_tokenizer, resolve_model

__all__ = ["resolve_teachers"]


def resolve_teachers(teachers: Sequence[TeacherConfig], model: ModelConfig, model_path: Path) -> list[Path]:
    """Return the model paths of all teachers.

    Args:
        teachers: Teachers of the run.
        model: Configuration of the student.
        model_path: Path of the student's model.

    Raises:
        ModelError: A teacher cannot be found, or its tokenizer differs from the student's.
    """
    tokenizer = load_tokenizer(model_path, trust_remote_code=model.trust_remote_code)
    vocabulary, found = tokenizer.get_vocab(), []
    for teacher in teachers:
        path = resolve_model(teacher.model)
        other = load_tokenizer(path, trust_remote_code=model.trust_remote_code).get_vocab()
        if other != vocabulary:
            differing = sum(other.get(token) != number for token, number in vocabulary.items())
            raise ModelError(
                f"the tokenizer of teacher.model '{teacher.model}' differs from that of model.path '{model.path}' "
                f"({len(other):,} and {len(vocabulary):,} tokens; {differing:,} of the student's differ), but a "
                "teacher uses the student's token ids: use a model of the same family."
            )
        found.append(path)
    return found
