"""Tests of Triton's door: parsing, streaming, the launcher, and a real tritonserver over the shipped model."""
