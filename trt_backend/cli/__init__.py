"""The command line, `trt-backend`: `app` has the commands and their options, one module a command does the work.

Nothing imports from here. Modules that take long to import (torch, tritonclient) are imported by the command that
needs them, so that `--help` is quick.
"""

from trt_backend.cli.app import main

__all__ = ["main"]
