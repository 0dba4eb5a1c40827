"""Where benchmarks print their results."""

from __future__ import annotations

import sys

from rich.console import Console

PLAIN_WIDTH = 120
"""Columns where there is no terminal to ask: rich would take 80, and cut the headings of wide tables."""


def results_console() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
