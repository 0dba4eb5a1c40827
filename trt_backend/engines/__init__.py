"""Engines: one protocol (`base`) and its implementations; the scheduler and the KV hierarchy are the same above all.

May import `models`, `plugins`, `memory` and the layout and tables of `kv`; imported by `scheduler` and above.
"""
