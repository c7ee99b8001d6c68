"""The `sglang` engine: an SGLang server that this package starts, or one that already runs.

    run ──► SGLangEngine ──► HTTP ──► SGLang server (its own processes and Python environment)
                 └──► weights as safetensors in a directory that both can read

SGLang pins other versions of PyTorch than ROLL, so the server may run in another Python environment
(`inference.options.python`), or anywhere (`inference.options.url`).
"""
