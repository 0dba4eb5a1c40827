"""`glm53-tiny`: a four-million-parameter model of the GLM-5.3 architecture that writes Python.

Read `config`, `corpus`, `tokenizer`, `network`, `train`, `export` in that order. It imports only torch, numpy,
tokenizers and safetensors (plus typer, rich and matplotlib in the command line); nothing imports it but tests.
"""
