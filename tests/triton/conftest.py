"""What several tests of this folder share: the shipped tokenizer, and one real server over the shipped model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadtest.server import ServeCommand
from trt_backend.build import find_model
from trt_backend.models.registry import read_config
from trt_backend.triton.text import Tokenizer

MODEL = "glm53-tiny"
SERVER_MODEL_LEN = 2048


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tokenizer of the shipped model."""
    folder = find_model(MODEL)
    return Tokenizer.load(folder, read_config(folder).vocab_size)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeCommand]:
    """`trt-backend serve` with a small pool, for all tests that leave it as they found it."""
    options = [f"--model={MODEL}", "--residency=hisparse", "--max-sessions=4"]
    options += [f"--max-model-len={SERVER_MODEL_LEN}", "--queue-limit=8"]
    with ServeCommand(tmp_path_factory.mktemp("server"), *options) as command:
        command.wait_ready()
        yield command
