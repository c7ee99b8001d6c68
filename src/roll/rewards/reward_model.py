"""A Hugging Face sequence-classification model as a reward.

    judge ──► Batcher (controller) ──► score_batch (a process of its own, which holds the model) ──► values

The model runs outside the controller and outside the workers that verify answers, so neither waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from roll.config.data import DataConfig
from roll.config.rewards import RewardModelReward
from roll.data.chat import TODAY
from roll.errors import ModelError, RewardInfraError
from roll.models import find_model
from roll.models.directory import read_json
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, in_pool
from roll.rewards.batching import Batcher
from roll.rewards.control_tokens import defuser
from roll.types import Message, Rollout

__all__ = ["check_reward_models", "prepare_worker", "reward_model_verifier", "score_batch"]

Conversation = list[Message]


def prepare_worker() -> None:
    """Import the model's packages before any time limit applies: it takes seconds."""
    import torch  # noqa: F401
    import transformers  # noqa: F401


def check_reward_models(data: Iterable[DataConfig]) -> None:
    """Check the models that a configuration's rewards name, before anything is started; no model is loaded or
    downloaded.

    Raises:
        ModelError: A model does not exist, or it is a generative model without a score.
    """
    rewards = (reward for entry in data for reward in entry.reward if isinstance(reward, RewardModelReward))
    for reward in rewards:
        path = find_model(reward.path, allow_quantized=True)
        kinds = read_json(path / "config.json").get("architectures") if path else None
        if isinstance(kinds, list) and kinds and all(str(kind).endswith("ForCausalLM") for kind in kinds):
            raise ModelError(
                f"reward_model.path '{reward.path}' is no reward model: a {kinds[0]} writes text and scores nothing. "
                "Choose a model that was trained to classify or score, such as a run of `pipeline: reward_model`."
            )


@functools.lru_cache(maxsize=1)
def _loaded(settings: str) -> tuple[Any, Any, Any]:
    """Return the model, its tokenizer and its device; they are loaded once per process."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from roll.models import resolve_model

    transformers_logging.disable_progress_bar()
    config = RewardModelReward.model_validate_json(settings)
    model: Any
    tokenizer: Any
    torch.set_num_threads(config.num_threads)
    path = resolve_model(config.path, allow_quantized=True)
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    device = _device(config.device)
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, trust_remote_code=config.trust_remote_code, output_loading_info=True
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        model = model.to(device).eval()
    except Exception as error:  # for unsupported files, libraries raise any exception
        raise ModelError(
            f"the reward model '{config.path}' cannot be loaded: {type(error).__name__}: {error}"
        ) from None
    if found["missing_keys"]:
        raise ModelError(
            f"'{config.path}' is no reward model: it lacks the weights {sorted(found['missing_keys'])[:3]}, which "
            "would be random. Choose a model that was trained to classify or score."
        )
    if config.label >= model.config.num_labels:
        raise ModelError(
            f"the reward model '{config.path}' has {model.config.num_labels} outputs, so `label` {config.label} is "
            f"none of them: choose one below {model.config.num_labels}."
        )
    if tokenizer.pad_token_id is not None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer, device


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"`device` '{name}' of the reward model is no device: {error}") from None


def _token_ids(tokenizer: Any, conversation: Conversation, answer: str, max_length: int) -> list[int]:
    """Return the token IDs of prompt and answer in the model's training format; keep the end of a long text."""
    answer = defuser(tokenizer)(answer)  # or the answer could end its message, and continue as another speaker
    if getattr(tokenizer, "chat_template", None):
        chat = [message.to_dict() for message in (*conversation, Message(role="assistant", content=answer))]
        # a template that writes the date gets the training date: else scores would change from day to day
        dated = {"strftime_now": TODAY.strftime} if "strftime_now" in str(tokenizer.chat_template) else {}
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, **dated)
    else:
        question = "\n\n".join(message.text for message in conversation)
        pairs = tokenizer.num_special_tokens_to_add(pair=True) > tokenizer.num_special_tokens_to_add(pair=False)
        both = (question, answer) if pairs else (f"{question}\n\n{answer}",)
        ids = tokenizer(*both)["input_ids"]
    return list(ids)[-max_length:]


def score_batch(settings: str, items: Sequence[tuple[Conversation, str]]) -> list[float]:
    """Return the values of conversations with their answers, before `scale` and `shift`. Runs in a worker.

    Args:
        settings: A `RewardModelReward`, as JSON.
        items: Prompt and answer of each conversation.
    """
    import torch

    config = RewardModelReward.model_validate_json(settings)
    model, tokenizer, device = _loaded(settings)
    sequences = [_token_ids(tokenizer, conversation, answer, config.max_length) for conversation, answer in items]
    pad = tokenizer.pad_token_id
    # without a padding token a model cannot tell where a shorter sequence ends: one sequence at a time
    groups = [range(len(sequences))] if pad is not None else [range(i, i + 1) for i in range(len(sequences))]
    values: list[float] = []
    for group in groups:
        longest = max(len(sequences[i]) for i in group)
        ids = torch.full((len(group), longest), pad or 0, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(group):
            ids[row, : len(sequences[i])] = torch.tensor(sequences[i], dtype=torch.long)
            mask[row, : len(sequences[i])] = 1
        with torch.inference_mode():
            logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float()
        values += _outputs(logits, config).tolist()
    return values


def _outputs(logits: Any, config: RewardModelReward) -> Any:
    """Return the scores of logits, shape [N], from shape [N, labels]."""
    if config.output == "probability":
        return logits.softmax(-1)[:, config.label]
    chosen = logits[:, config.label]
    return chosen.sigmoid() if config.output == "sigmoid" else chosen


def reward_model_verifier(config: RewardModelReward, pool: WorkerPool) -> Verifier:
    """Build the verifier, which scores in worker processes of its own, separate from the pool."""
    import math

    own = pool.sub_pool(config.num_workers)
    settings = config.model_dump_json()

    async def score(items: Sequence[tuple[Conversation, str]]) -> list[float]:
        try:
            return await in_pool(own, score_batch, settings, list(items), time_limit_s=config.time_limit_s)
        except TimeoutError as error:  # a slow model is an infrastructure failure, not the answer's
            raise RewardInfraError(f"the reward model '{config.path}': {error}") from None

    batcher = Batcher(score, batch_size=config.batch_size, num_runners=config.num_workers)

    async def judge(rollout: Rollout) -> Judgement:
        raw = await batcher.submit(([*rollout.prompt.asked], rollout.text))
        if not math.isfinite(raw):
            raise RewardInfraError(f"the reward model '{config.path}' gave {raw}")
        value = config.scale * raw + config.shift
        solved = None if config.solved_at is None else value >= config.solved_at
        return Judgement(value=value, verdict=f"{value:.3g}", correct=solved)

    async def close() -> None:
        await batcher.close()
        await own.close()

    return Verifier(judge=judge, decides=config.solved_at is not None, close=close)
