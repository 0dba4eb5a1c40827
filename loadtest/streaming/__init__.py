"""What `loadtest.bench_streaming` serves and how it asks: the two models that it compares, and the client of both.

The models are copied into a model repository as model.py. May import `trt_backend`; imported by nobody else.
"""
