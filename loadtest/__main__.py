"""`python -m loadtest`: every benchmark under one command. Each can be run as `python -m loadtest.bench_NAME`, too."""

from __future__ import annotations

import importlib

import typer

BENCHMARKS = {
    "residency": "Raise the load and lower it again, with optional residency off and on.",
    "reclaim": "What admissions take back, by reclaim order, and refills in vain.",
    "resolver": "Finding rows: the kernels' host twin beside the NumPy oracle.",
    "decode": "Decode steps, beside transformers.",
    "backup": "What background copies cost decoding.",
    "tick": "A tick of the control plane.",
    "streaming": "Responses a second through a real tritonserver.",
}
"""Names of `loadtest.bench_*` and what they measure; a benchmark is imported only when it is run."""

app = typer.Typer(help="Benchmarks of this backend.", no_args_is_help=True, add_completion=False)
bench = typer.Typer(help="Run a benchmark; `bench NAME --help` shows its options.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@app.callback()
def main() -> None:
    """Load tests and benchmarks of this backend."""


def _register(name: str, help_text: str) -> None:
    # All options, --help too, are the benchmark's own.
    @bench.command(
        name,
        help=help_text,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def run(context: typer.Context) -> None:
        own = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        own.command()(importlib.import_module(f"loadtest.bench_{name}").main)
        own(args=context.args, prog_name=context.command_path)


for name, help_text in BENCHMARKS.items():
    _register(name, help_text)

if __name__ == "__main__":
    app(prog_name="python -m loadtest")
