"""Demonstrations and benchmarks. Talks to the server through tritonclient; benchmarks import what they measure."""
