"""Run by transformers 4: what it makes of exported models. Knows nothing of ROLL.

Usage: read_exports.py REQUEST ANSWER
REQUEST is JSON: {"models": {name: directory}, "tokens": [[…], …], "texts": […]}.
"""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def read(directory: str, tokens: list[list[int]], texts: list[str]) -> dict[str, object]:
    """Return a model's logits for the tokens and its tokenizer's tokens for the texts."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        logits = model.eval()(torch.tensor(tokens)).logits
    chat = [{"role": "user", "content": texts[0]}]
    return {
        "logits": logits.double().numpy(),
        "missing": sorted(info["missing_keys"]) + sorted(info["unexpected_keys"]),
        "dtype": str(model.config.dtype),
        "class": type(tokenizer).__name__,
        "tokens": [tokenizer(text)["input_ids"] for text in texts],
        "decoded": [tokenizer.decode(tokenizer(text)["input_ids"]) for text in texts],
        "special": sorted(tokenizer.all_special_tokens),
        "chat": tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False),
    }


def main() -> None:
    """Read all models of a request."""
    warnings.simplefilter("ignore")
    request = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    found = {name: read(path, request["tokens"], request["texts"]) for name, path in request["models"].items()}
    np.savez(
        sys.argv[2],
        version=transformers.__version__,
        **{f"{name}/logits": answer.pop("logits") for name, answer in found.items()},
        said=json.dumps(found),
    )


if __name__ == "__main__":
    main()
