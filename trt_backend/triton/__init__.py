"""What Triton's model.py needs (parse, text, stream, service, metrics), and the launcher that runs tritonserver.

Only `trt_backend.cli` and the model.py of `model_repo` import from here; it imports the scheduler and what is below it.
"""
