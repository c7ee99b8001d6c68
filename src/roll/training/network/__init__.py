"""The trainer's HF network: from a packed row of tokens to the inputs of a loss.

    loading ──► HF model, lora, fp8, fused ──► hidden_states ──► policy (log-probs) or value ──► loss_inputs

`logprobs`, `top_logprobs`, `distributions` and `divergence` compute from hidden states; `weights` streams weights to
engines; `pipeline_split` and `model_chunks` split layers over pipeline ranks; `routing` implements load balancing and
router replay; `packing_check` compares packed results with the model's own before a run.
"""
