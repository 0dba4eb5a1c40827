"""The models in PyTorch over flat token lists, their configurations and checkpoints; `registry` is the way in.

Imports `trt_backend.kv.layout` and `trt_backend.config`. It knows no page, slot or location: `state` says what a model
asks of whoever keeps its rows.
"""
