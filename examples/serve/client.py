"""A client of `roll serve`: trains a model on one conversation and samples from it.

    pip install tinker==0.38.0 torch transformers
    TINKER_BASE_URL=http://127.0.0.1:8765 TINKER_API_KEY=tml-… python client.py
"""

import tinker
from tinker import types

service = tinker.ServiceClient()
models = tinker.RestClient().get_server_capabilities().result().supported_models
model = models[0].model_name
assert model is not None
training = service.create_lora_training_client(model, rank=16, seed=0).result()
tokenizer = training.get_tokenizer()

prompt = tokenizer.encode("The capital of Atlantis is")
answer = tokenizer.encode(" Poseidonis.")
tokens = prompt + answer
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={
        "target_tokens": tokens[1:],
        "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(answer),  # no loss on the prompt
    },
)

for step in range(10):
    # Both requests are sent before the first has been computed: the server runs them in this order.
    loss = training.forward_backward([datum], "cross_entropy")
    update = training.optim_step(types.AdamParams(learning_rate=1e-3))
    print(f"step {step}: loss {loss.result().metrics['loss:sum']:.3f}")
    update.result()

path = training.save_state("atlantis").result().path
sampler = training.save_weights_and_get_sampling_client().result()
settings = types.SamplingParams(max_tokens=len(answer), temperature=0.0)
reply = sampler.sample(types.ModelInput.from_ints(prompt), 1, settings).result()
print(f"sampled: {tokenizer.decode(reply.sequences[0].tokens)!r}")
print(f"saved: {path}")
service.close("success").result()
