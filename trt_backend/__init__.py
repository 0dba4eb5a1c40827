"""The runtime of Adaptive DHiSparse: a Triton backend that owns admission and reclaim of sparse-attention KV rows.

Rooms: kv and models at the bottom, then memory, engines, scheduler, triton, cli. import-linter holds the order.
"""

__version__ = "0.1.0"
