"""A Hugging Face sequence-classification model as a reward.

    judge ──► Batcher (controller) ──► score_batch (a separate process with the model) ──► values

The model runs in a process of its own, so that neither the controller nor the workers that verify answers wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from roll.config.data import DataConfig
from roll.config.rewards import RewardModelReward
from roll.data.chat import TEMPLATE_DATE
from roll.errors import ModelError, RewardInfraError
from roll.models import find_model
from roll.models.directory import read_json
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, run_in_pool
from roll.rewards.batching import Batcher
from roll.rewards.control_tokens import make_escaper
from roll.types import Message, Rollout

__all__ = ["build_reward_model_verifier", "check_reward_models", "prepare_worker", "score_batch"]

Conversation = list[Message]


def prepare_worker() -> None:
    """Import the packages that the model needs, which takes seconds, before any time limit applies."""
    import torch  # noqa: F401
    import transformers  # noqa: F401


def check_reward_models(data: Iterable[DataConfig]) -> None:
    """Check the reward models of a configuration before a run starts; no model is loaded or downloaded.

    Raises:
        ModelError: A model does not exist, or it is a generative model without a score.
    """
    rewards = (reward for entry in data for reward in entry.reward if isinstance(reward, RewardModelReward))
    for reward in rewards:
        path = find_model(reward.path, allow_quantized=True)
        kinds = read_json(path / "config.json").get("architectures") if path else None
        if isinstance(kinds, list) and kinds and all(str(kind).endswith("ForCausalLM") for kind in kinds):
            raise ModelError(
                f"reward_model.path '{reward.path}' is not a reward model: a {kinds[0]} generates text without scores. "
                "Choose a model that was trained to classify or score, such as a run of `pipeline: reward_model`."
            )


@functools.lru_cache(maxsize=1)
def _load(settings: str) -> tuple[Any, Any, Any]:
    """Load the model once per process, and return it with its tokenizer and its device."""
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
    device = _resolve_device(config.device)
    try:
        model, loading_info = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, trust_remote_code=config.trust_remote_code, output_loading_info=True
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        model = model.to(device).eval()
    except Exception as error:  # for unsupported files, libraries raise any exception
        raise ModelError(
            f"the reward model '{config.path}' cannot be loaded: {type(error).__name__}: {error}"
        ) from None
    if loading_info["missing_keys"]:
        raise ModelError(
            f"'{config.path}' is not a reward model: it is missing the weights "
            f"{sorted(loading_info['missing_keys'])[:3]}, which would be initialized randomly. Choose a model that "
            "was trained to classify or score."
        )
    if config.label >= model.config.num_labels:
        raise ModelError(
            f"the reward model '{config.path}' has {model.config.num_labels} outputs, so `label` must be below "
            f"{model.config.num_labels}, got {config.label}."
        )
    if tokenizer.pad_token_id is not None:
        # Transformers' classification models find the last token of each sequence by this ID, and refuse a batch
        # without it.
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer, device


def _resolve_device(name: str) -> Any:
    import torch

    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ModelError(
            f"`device` of the reward model must be 'auto' or a device such as 'cuda:0', got '{name}': {error}"
        ) from None


def _tokenize(tokenizer: Any, conversation: Conversation, answer: str, max_length: int) -> list[int]:
    """Return the token IDs of prompt and answer in the model's training format, truncated at the start."""
    answer = make_escaper(tokenizer)(
        answer
    )  # otherwise the answer could end its message and continue as another speaker
    if getattr(tokenizer, "chat_template", None):
        chat = [message.to_dict() for message in (*conversation, Message(role="assistant", content=answer))]
        # a template that writes the date gets the training date; otherwise scores would change from day to day
        dated = {"strftime_now": TEMPLATE_DATE.strftime} if "strftime_now" in str(tokenizer.chat_template) else {}
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, **dated)
    else:
        question = "\n\n".join(message.text for message in conversation)
        pairs = tokenizer.num_special_tokens_to_add(pair=True) > tokenizer.num_special_tokens_to_add(pair=False)
        both = (question, answer) if pairs else (f"{question}\n\n{answer}",)
        ids = tokenizer(*both)["input_ids"]
    return list(ids)[-max_length:]


def score_batch(settings: str, items: Sequence[tuple[Conversation, str]]) -> list[float]:
    """Score conversations with their answers, before `scale` and `shift` are applied. Runs in a worker.

    Args:
        settings: A `RewardModelReward`, as JSON.
        items: Prompt and answer of each conversation.
    """
    import torch

    config = RewardModelReward.model_validate_json(settings)
    model, tokenizer, device = _load(settings)
    sequences = [_tokenize(tokenizer, conversation, answer, config.max_length) for conversation, answer in items]
    pad = tokenizer.pad_token_id
    # without a padding token, a model cannot tell where a shorter sequence ends, so sequences are scored one by one
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
        values += _compute_scores(logits, config).tolist()
    return values


def _compute_scores(logits: Any, config: RewardModelReward) -> Any:
    """Convert logits, shape [N, labels], to the score of the configured label, shape [N]."""
    if config.output == "probability":
        return logits.softmax(-1)[:, config.label]
    chosen = logits[:, config.label]
    return chosen.sigmoid() if config.output == "sigmoid" else chosen


def build_reward_model_verifier(config: RewardModelReward, pool: WorkerPool) -> Verifier:
    """Build the verifier of the reward `reward_model`, which runs in separate worker processes."""
    import math

    workers = pool.create_sub_pool(config.num_workers)
    settings = config.model_dump_json()

    async def score(items: Sequence[tuple[Conversation, str]]) -> list[float]:
        try:
            return await run_in_pool(workers, score_batch, settings, list(items), time_limit_s=config.time_limit_s)
        except TimeoutError:  # a slow model is an infrastructure failure, not the answer's
            raise RewardInfraError(
                f"the reward model '{config.path}' did not score a batch within {config.time_limit_s:g} s: lower "
                "batch_size, or raise time_limit_s"
            ) from None

    batcher = Batcher(score, batch_size=config.batch_size, num_runners=config.num_workers)

    async def judge(rollout: Rollout) -> Judgement:
        raw = await batcher.submit(([*rollout.prompt.input_messages], rollout.text))
        if not math.isfinite(raw):
            raise RewardInfraError(f"the reward model '{config.path}' returned {raw}, which is not a finite score")
        value = config.scale * raw + config.shift
        solved = None if config.solved_at is None else value >= config.solved_at
        return Judgement(value=value, verdict=f"{value:.3g}", correct=solved)

    async def close() -> None:
        await batcher.close()
        await workers.close()

    return Verifier(judge=judge, decides_correctness=config.solved_at is not None, close=close)
