"""A program that trains and samples with the unmodified client library; prints what it measured as JSON.

python train.py NAME TOKENIZER_DIRECTORY
"""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any

import tinker
import torch
from tinker import types

NAME, TOKENIZER = sys.argv[1:]
ADAM = types.AdamParams(learning_rate=0.02)
PROMPT = list(b"2 + 2 =")
ANSWER = list(b" 4!")


def build_datum(prompt: list[int], answer: list[int], **inputs: Any) -> types.Datum:
    tokens = [token + 4 for token in prompt + answer]  # the tiny model's bytes begin at 4
    size = len(tokens) - 1
    ones = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    named = {"weights": ones} if not inputs else {name: [value * one for one in ones] for name, value in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **{key: values[:size] for key, values in named.items()}},
    )


service = tinker.ServiceClient()
training = service.create_lora_training_client(NAME, rank=4, seed=1).result()
found: dict[str, Any] = {"info": training.get_info().model_dump(mode="json")}
tokenizer = training.get_tokenizer()
found["text"] = tokenizer.decode([token + 4 for token in PROMPT])

# supervised training; the update is submitted before the loss is known
losses = []
for _ in range(5):
    future, update = (
        training.forward_backward([build_datum(PROMPT, ANSWER)], "cross_entropy"),
        training.optim_step(ADAM),
    )
    losses.append(future.result().metrics["loss:sum"])
    update.result()
found["losses"] = losses

# sampling from a snapshot, which does not change when training goes on
sampler = training.save_weights_and_get_sampling_client().result()
prompt = types.ModelInput.from_ints([token + 4 for token in PROMPT])
params = types.SamplingParams(max_tokens=3, seed=5, temperature=1.0)
first = sampler.sample(prompt, 4, params, include_prompt_logprobs=True).result()
training.forward_backward([build_datum(PROMPT, ANSWER)], "cross_entropy").result()
training.optim_step(ADAM).result()
again = sampler.sample(prompt, 4, params).result()
found["same"] = [s.tokens for s in first.sequences] == [s.tokens for s in again.sequences]
found["sequence_ids"] = len({s.sequence_id for s in (*first.sequences, *again.sequences)})
found["prompt_logprobs"] = first.prompt_logprobs

# trainer and sampler agree about the log-probs of what was sampled
newest = training.save_weights_and_get_sampling_client().result()
reply = newest.sample(prompt, 8, types.SamplingParams(max_tokens=6, seed=7)).result()
rows = [(list(s.tokens), list(s.logprobs)) for s in reply.sequences]
tokens = [token + 4 for token in PROMPT]
data = []
for answer, logprobs in rows:
    whole, skipped = tokens + answer, [0.0] * (len(tokens) - 1)
    inputs = {"target_tokens": whole[1:], "logprobs": skipped + logprobs, "advantages": skipped + [1.0] * len(answer)}
    data.append(types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs))
output = training.forward(data, "importance_sampling").result()
found["difference"] = max(
    abs(a - b)
    for (answer, logprobs), row in zip(rows, output.loss_fn_outputs, strict=True)
    for a, b in zip(logprobs, row["logprobs"].tolist()[-len(answer) :], strict=True)
)
found["ratio_loss"] = output.metrics["loss:sum"] + sum(len(answer) for answer, _ in rows)

# every loss trains
for loss in ("importance_sampling", "ppo", "cispo", "dro"):
    result = training.forward_backward(data, loss).result()
    metrics = training.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)).result().metrics
    found[loss] = [result.metrics["loss:sum"], metrics["grad_norm"]]


def custom_loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = sum((p.exp() * d.loss_fn_inputs["weights"].to_torch()).sum() for d, p in zip(data, logprobs, strict=True))
    return -loss, {"mine": 1.0}


found["custom"] = training.forward_backward_custom([build_datum(PROMPT, ANSWER)], custom_loss).result().metrics
training.optim_step(ADAM).result()

# chunks: more data than one request may have, the first chunk is sent last
many = [build_datum(PROMPT, ANSWER) for _ in range(1100)]
result = training.forward(many, "cross_entropy").result()
found["chunks"] = [len(result.loss_fn_outputs), result.metrics["loss:sum"]]
one = training.forward(many[:1], "cross_entropy").result().metrics["loss:sum"]
found["one"] = one

# a bad datum discards the gradient and the pipelined update
bad = types.Datum(
    model_input=types.ModelInput.from_ints([5, 100000]), loss_fn_inputs={"target_tokens": [5, 6], "weights": [1.0, 1.0]}
)
futures = [training.forward_backward([build_datum(PROMPT, ANSWER), bad], "cross_entropy"), training.optim_step(ADAM)]
found["failures"] = []
for future in futures:
    try:
        future.result()
    except tinker.RequestFailedError as error:
        found["failures"].append([str(error), str(error.category)])
found["one_after_failure"] = training.forward(many[:1], "cross_entropy").result().metrics["loss:sum"]

# checkpoints: a new client continues with the same loss
training.forward_backward(many[:3], "cross_entropy").result()
training.optim_step(ADAM).result()
path = training.save_state("state").result().path
resumed = service.create_training_client_from_state_with_optimizer(path).result()
for client in (training, resumed):
    client.forward_backward(many[:2], "cross_entropy").result()
    client.optim_step(ADAM).result()
    found.setdefault("resumed", []).append(client.forward(many[:1], "cross_entropy").result().metrics["loss:sum"])
named = training.save_weights_for_sampler("final").result().path
reader = service.create_sampling_client(model_path=named).result()
found["named"] = reader.sample(prompt, 1, params).result().sequences[0].stop_reason
base = service.create_sampling_client(base_model=NAME).result()
found["scores"] = base.compute_logprobs(prompt).result()
copy = pickle.loads(pickle.dumps(reader))
found["pickled"] = [s.tokens for s in copy.sample(prompt, 1, params).result().sequences] == [
    s.tokens for s in reader.sample(prompt, 1, params).result().sequences
]
replies = [reader.sample(prompt, 1, types.SamplingParams(max_tokens=4)) for _ in range(200)]
found["concurrent"] = len({tuple(each.result().sequences[0].tokens) for each in replies})
for name, wanted in (("stop string", tokenizer.decode([37])), ("stop tokens", [37])):
    params = types.SamplingParams(max_tokens=40, seed=3, stop=wanted)
    found[name] = [[s.tokens, s.stop_reason] for s in reader.sample(prompt, 2, params).result().sequences]
found["refused"] = []
for call in (
    lambda: training.forward_backward(many[:1], "stable_reinforce").result(),
    lambda: reader.sample(prompt, 1, types.SamplingParams(max_tokens=1), topk_prompt_logprobs=3).result(),
    lambda: service.create_lora_training_client(NAME, rank=400).result(),
):
    try:
        call()
    except Exception as error:
        found["refused"].append(str(error))
service.close("success").result()
print(json.dumps(found))
