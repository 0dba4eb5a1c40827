"""`python -m trt_backend.cli`: the same as `trt-backend`."""

from trt_backend.cli.app import main

main()
