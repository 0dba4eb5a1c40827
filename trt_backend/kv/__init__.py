"""The hierarchy: layout, budget, pages, sessions and transfers of KV rows in two tiers, in plain Python and NumPy.

Imports only the standard library, NumPy and `trt_backend.config`; it knows no model, no engine and no torch.
"""
