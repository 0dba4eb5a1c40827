"""Continuous batching over the hierarchy and an engine; one thread owns all state.

`intake` is the door for other threads, `queue` says who is next, `planning` makes a step's batch, `sampling` chooses
tokens, `scheduler` runs the loop. May import `kv` and the engine protocol; imported by `build` and the faces above.
"""

from trt_backend.scheduler.intake import SchedulerLimits
from trt_backend.scheduler.scheduler import Scheduler, Snapshot, Totals

__all__ = ["Scheduler", "SchedulerLimits", "Snapshot", "Totals"]
