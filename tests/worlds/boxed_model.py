"""A tiny model that has learned to answer everything with a boxed digit: some of its answers are right, some wrong."""

from __future__ import annotations

from pathlib import Path

from worlds.tiny_model import write_tiny_model

__all__ = ["write_boxed_model"]

_START, _END, _FIRST_BYTE = 1, 2, 4
_STEPS, _BATCH_SIZE = 150, 8


def write_boxed_model(directory: Path, context_length: int = 2048, hidden: int = 64) -> Path:
    r"""Write a model whose answer to any prompt is `\boxed{d}` with a random digit d, nearly always."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_tiny_model(directory, hidden=hidden, context_length=context_length)
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    random = torch.Generator().manual_seed(0)
    encode = AutoTokenizer.from_pretrained(directory).encode
    head = encode("<|im_end|>\n<|im_start|>assistant\n")
    answers = [encode(f"\\boxed{{{digit}}}<|im_end|>") for digit in range(10)]
    assert head[0] == _END and _START in head and all(answer[-1] == _END for answer in answers)
    for step in range(_STEPS):
        # Long prompts too: an answer must not depend on what is far away.
        length = int(torch.randint(4, 600 if step % 5 == 0 else 60, (1,), generator=random))
        rows, labels = [], []
        for _ in range(_BATCH_SIZE):
            prompt = torch.randint(_FIRST_BYTE, 260, (length,), generator=random).tolist() + head
            answer = answers[int(torch.randint(10, (1,), generator=random))]
            rows.append(prompt + answer)
            labels.append([-100] * len(prompt) + answer)
        loss = network(input_ids=torch.tensor(rows), labels=torch.tensor(labels)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    network.save_pretrained(directory)
    return directory
