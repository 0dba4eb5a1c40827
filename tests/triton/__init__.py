"""Tests of Triton's door: parsing, streaming, the launcher, and a real tritonserver over the shipped model."""

import os

# The tests start processes while gRPC's threads run; what a child does before it becomes another program is no call
# into gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
