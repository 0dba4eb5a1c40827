"""The run folder: what is laid out, what is kept of earlier runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton.echo import write_model
from trt_backend.config import ConfigError, DeploymentConfig, load_deployment
from trt_backend.triton.repository import KEPT_LOGS, make_run_folder


@pytest.mark.parametrize(("batch_dimension", "size"), [(True, 1), (False, 0)])
def test_the_batch_dimension_of_the_deployment_is_the_models(tmp_path: Path, batch_dimension: bool, size: int) -> None:
    deployment = DeploymentConfig(batch_dimension=batch_dimension, max_sessions=3)
    folder = make_run_folder(tmp_path / "run", "dhs", deployment)
    assert f"\nmax_batch_size: {size}\n" in (folder.models / "dhs" / "config.pbtxt").read_text()
    assert load_deployment(folder.deployment) == deployment


def test_a_template_without_its_batch_size_is_refused(tmp_path: Path) -> None:
    template = write_model(tmp_path / "template")
    (template / "config.pbtxt").write_text('backend: "python"\n')
    with pytest.raises(ConfigError, match=r"config\.pbtxt: 0 lines `max_batch_size: N`"):
        make_run_folder(tmp_path / "run", "echo", DeploymentConfig(), template)


def test_the_last_few_logs_are_kept_and_the_rest_is_made_anew(tmp_path: Path) -> None:
    template = write_model(tmp_path / "template")
    for run in range(KEPT_LOGS + 3):
        folder = make_run_folder(tmp_path / "run", f"echo{run}", DeploymentConfig(), template)
        folder.log.write_text(f"log of run {run}")
    last = KEPT_LOGS + 2
    assert [path.name for path in folder.models.iterdir()] == [f"echo{last}"]
    logs = {path.name: path.read_text() for path in folder.root.glob("server.log*")}
    expected = {f"server.log.{age}": f"log of run {last - age}" for age in range(1, KEPT_LOGS + 1)}
    assert logs == expected | {"server.log": f"log of run {last}"}


def test_an_illegal_model_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_name='a/b': legal: up to 64 letters"):
        make_run_folder(tmp_path / "run", "a/b", DeploymentConfig())
