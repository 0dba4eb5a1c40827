"""The commands that need no server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trt_backend.cli.app import app
from trt_backend.cli.doctor import Status, examine
from trt_backend.cli.layout import parse_contexts, size

runner = CliRunner()


def test_layout_shows_the_published_sizes_of_glm_53() -> None:
    shown = runner.invoke(app, ["layout", "--model", "glm-5.3"])
    assert shown.exit_code == 0
    cells = {tuple(cell.strip() for cell in line.split("│")[1:3]) for line in shown.output.splitlines() if "│" in line}
    assert ("page", "3.12 MiB") in cells
    assert ("hot cache", "200 MiB") in cells
    assert ("full history at 32K", "1.56 GiB") in cells
    assert ("full history at 100K", "4.88 GiB") in cells
    assert ("index keys at 32K", "86.62 MiB") in cells


def test_layout_gives_exact_bytes_as_json() -> None:
    found = json.loads(runner.invoke(app, ["layout", "--model", "glm-5.3", "--json"]).output)
    assert found["row_bytes"] == [656]
    assert found["page_bytes"] == 656 * 64 * 78
    assert found["hot_bytes"] == 64 * 656 * 64 * 78
    assert len(found["groups"]) == 21
    assert sum(found["groups"]) == 78
    assert [context["tokens"] for context in found["contexts"]] == [32768, 102400]
    assert found["contexts"][0]["history_bytes"] == 656 * 78 * 32768
    assert found["contexts"][0]["index_key_bytes"] == 132 * 21 * 32768


def test_layout_of_a_shipped_model_and_other_contexts() -> None:
    options = ["layout", "--model", "glm53-tiny", "--row-format", "fp32", "--contexts", "1K,100", "--json"]
    found = json.loads(runner.invoke(app, options).output)
    assert found["row_bytes"] == [4 * (128 + 16)]
    assert [context["tokens"] for context in found["contexts"]] == [1024, 100]
    assert found["hot_tokens"] == 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nothing"], "model='nothing' is neither a folder nor a shipped model"),
        (["--hot-tokens", "64"], "hot_tokens=64 is smaller than the largest top-k, 2048 tokens"),
        (["--hot-tokens", "4100"], "hot_tokens=4100 is not a multiple of page_tokens=64"),
        (["--contexts", "32K,-1"], "contexts='32K,-1': '-1' is not legal"),
    ],
)
def test_layout_refuses_what_does_not_fit(options: list[str], message: str) -> None:
    shown = runner.invoke(app, ["layout", *options])
    assert shown.exit_code == 1
    assert message in shown.output


def test_contexts_and_sizes_read_as_people_write_them() -> None:
    assert parse_contexts("32K, 100000") == [32768, 100000]
    assert [size(count) for count in (656, 3 * 2**20, 200 * 2**20, 1.5 * 2**30)] == [
        "656 B",
        "3.00 MiB",
        "200 MiB",
        "1.50 GiB",
    ]


def test_layout_imports_no_torch() -> None:
    script = "import sys; from typer.testing import CliRunner; from trt_backend.cli.app import app; "
    script += "assert CliRunner().invoke(app, ['layout']).exit_code == 0; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_doctor_finds_this_machine_able_to_serve_and_starts_the_server_to_know() -> None:
    shown = runner.invoke(app, ["doctor", "--json"])
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.output)
    assert report["ok"] is True
    found = {check["name"]: check for check in report["checks"]}
    assert found["tritonserver"]["status"] == "ok"
    assert found["tritonserver"]["found"].startswith("2.")
    assert set(found) >= {"Python", "libpython", "C++ compiler", "C library", "numpy", "shared memory", "GPU"}


def test_the_doctor_names_a_server_that_is_missing_and_the_fix(tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in examine(tmp_path / "tritonserver")}
    assert findings["tritonserver"].status is Status.FAIL
    assert "not an executable file" in findings["tritonserver"].found
    assert "nvidia-pytriton" in findings["tritonserver"].fix


def test_generate_prints_the_text_and_then_what_it_took(endless_model: Path) -> None:
    options = ["generate", "import os\n", "--max-tokens", "8", "--max-model-len", "512", "--model", str(endless_model)]
    plain = runner.invoke(app, options)
    assert plain.exit_code == 0, plain.output
    found = json.loads(runner.invoke(app, [*options, "--json"]).stdout)
    assert plain.stdout == found["text"] + "\n"
    assert found["tokens"] == 8
    assert found["finish"] == "length"
    assert found["ttft_ms"] > 0
    assert found["rows"]["masked"] == 0
    assert "TPOT" in plain.stderr


def test_generate_refuses_what_a_server_would_refuse() -> None:
    refused = runner.invoke(app, ["generate", "x", "--max-tokens", "600", "--max-model-len", "512"])
    assert refused.exit_code == 1
    assert "INVALID_ARGUMENT id=generate max_tokens=600 with a 1-token prompt needs 601 positions" in refused.output


def test_config_shows_each_setting_with_its_source_and_refuses_what_serve_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("max_sessions: 4\nserver:\n  http_port: 9000\n")
    monkeypatch.setenv("DHS_QUEUE_LIMIT", "7")
    options = ["config", "--config", str(file), "--no-batch-dimension", "--grpc-port", "9001"]
    found = json.loads(runner.invoke(app, [*options, "--json"]).output)
    assert found["max_sessions"] == {"value": 4, "source": str(file)}
    assert found["server.http_port"] == {"value": 9000, "source": str(file)}
    assert found["queue_limit"] == {"value": 7, "source": "environment DHS_QUEUE_LIMIT"}
    assert found["batch_dimension"] == {"value": False, "source": "--batch-dimension"}
    assert found["server.grpc_port"] == {"value": 9001, "source": "--grpc-port"}
    lines = [line.split(maxsplit=2) for line in runner.invoke(app, options).output.splitlines()]
    assert ["queue_limit", "7", "environment DHS_QUEUE_LIMIT"] in lines
    assert ["server.max_restarts", "2", "default"] in lines
    refused = runner.invoke(app, [*options, "--max-model-len=9000"])
    assert refused.exit_code == 1
    assert "max_model_len=9000 is not legal" in refused.output
