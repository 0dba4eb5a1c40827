"""Where settings come from, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trt_backend.config import ConfigError, LogFormat, Residency, ServerProtocol
from trt_backend.settings import FIELDS, flag_of, read_settings, variable_of

DOCS = Path(__file__).parent.parent / "docs" / "operations.md"


def write(folder: Path, text: str) -> Path:
    file = folder / "deployment.yaml"
    file.write_text(text)
    return file


def fault(file: Path | None = None, flags: dict[str, Any] | None = None, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_settings(file, flags or {}, environment)
    return str(caught.value)


def test_flags_go_over_the_environment_over_the_file_over_defaults_and_each_source_is_kept(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "max_sessions: 4\nqueue_limit: 5\nresidency: resident\nserver:\n  http_port: 9000\n  grpc_port: 9001\n"
        "  metrics_port: 9002\n  restricted_protocols: [trace, health]\n",
    )
    environment = {
        "DHS_QUEUE_LIMIT": "6",
        "DHS_SERVER_GRPC_PORT": "9101",
        "DHS_SERVER_METRICS_PORT": "9102",
        "HOME": "/",
    }
    settings = read_settings(file, {"threads": "2", "server.metrics_port": "9202"}, environment)
    deployment, server = settings.deployment, settings.server
    assert (deployment.max_sessions, deployment.queue_limit, deployment.threads) == (4, 6, 2)
    assert deployment.residency is Residency.RESIDENT
    assert (server.http_port, server.grpc_port, server.metrics_port) == (9000, 9101, 9202)
    assert server.restricted_protocols == (ServerProtocol.TRACE, ServerProtocol.HEALTH)
    sources = {key: source for key, _, source in settings.table()}
    assert sources["max_sessions"] == str(file)
    assert sources["queue_limit"] == "environment DHS_QUEUE_LIMIT"
    assert sources["threads"] == "--threads"
    assert sources["server.http_port"] == str(file)
    assert sources["server.grpc_port"] == "environment DHS_SERVER_GRPC_PORT"
    assert sources["server.metrics_port"] == "--metrics-port"
    assert sources["page_tokens"] == "default"
    assert list(sources) == list(FIELDS)


def test_a_json_file_and_an_empty_one_are_files_too(tmp_path: Path) -> None:
    file = write(tmp_path, '{"max_sessions": 3, "server": {"log_format": "json"}}')
    settings = read_settings(file, {}, {})
    assert (settings.deployment.max_sessions, settings.server.log_format) == (3, LogFormat.JSON)
    assert read_settings(write(tmp_path, "# nothing yet\n"), {}, {}).deployment.max_sessions == 32


def test_a_commands_own_default_is_still_a_default() -> None:
    preset = {"max_sessions": 1}
    assert ("max_sessions", 1, "default") in read_settings(None, {}, {}, preset).table()
    assert read_settings(None, {}, {"DHS_MAX_SESSIONS": "7"}, preset).deployment.max_sessions == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pages: 10", "pages=10: unknown setting; the nearest legal one is host_pages"),
        ("max_session: 10", "max_session=10: unknown setting; the nearest legal one is max_sessions"),
        ("http_port: 80", "http_port=80: unknown setting; the nearest legal one is server.http_port"),
        ("sever:\n  http_port: 80", "unknown setting; the nearest legal one is server"),
        ("server:\n  htp_port: 80", "server.htp_port=80: unknown setting; the nearest legal one is server.http_port"),
        ("max_sessions: 0", "max_sessions=0: Input should be greater than or equal to 1; legal: 1 to 4096"),
        ("max_sessions: yes", "max_sessions=True: Input is a truth value; legal: 1 to 4096"),
        ("page_tokens: 17", "page_tokens=17: Input should be a multiple of 16; legal: 16 to 1024, multiples of 16"),
        ("residency: host", "residency='host': Input should be 'resident', 'hisparse'"),
        ("stall_seconds: .inf", "stall_seconds=inf: Input should be a finite number; legal: more than 0 to 86400"),
        ("server:\n  http_address: localhost", "server.http_address='localhost': Input is not a valid IPv4 address"),
        ("server:\n  restricted_protocols: [log]", "legal: health, metadata, inference, shared-memory, "),
        ("server: 8000", "server=8000: legal: settings of the server"),
        ("- 1", "(top level)=[1]: legal: settings, one `key: value` a line"),
        ("max_sessions: 1\nmax_sessions: 2", "can't be read as YAML: max_sessions twice"),
        ("{", "can't be read as YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_the_key_the_value_and_what_is_legal(
    tmp_path: Path, text: str, message: str
) -> None:
    file = write(tmp_path, text)
    said = fault(file)
    assert said.startswith(f"{file}: ")
    assert message in said


def test_a_value_is_judged_even_where_another_goes_over_it(tmp_path: Path) -> None:
    file = write(tmp_path, "max_sessions: 0")
    assert fault(file, {"max_sessions": "4"}).startswith(f"{file}: max_sessions=0")


def test_wrong_variables_and_flags_are_named_and_all_faults_of_a_place_are_told_at_once() -> None:
    assert fault(DHS_MAX_SESSION="1") == (
        "environment DHS_MAX_SESSION: unknown variable; the nearest legal one is DHS_MAX_SESSIONS"
    )
    assert fault(DHS_SERVER_HTTP_PORT="x").startswith("environment DHS_SERVER_HTTP_PORT: server.http_port='x': ")
    lines = fault(flags={"threads": "0", "server.drain_seconds": "-1"}).split("\n")
    assert [line.split(":")[0] for line in lines] == ["--threads", "--drain-seconds"]


def test_a_secret_is_shown_nowhere() -> None:
    assert fault(DHS_SERVER_ADMIN_KEY="too short") == (
        "environment DHS_SERVER_ADMIN_KEY: server.admin_key=********: "
        "Value error, legal: 16 to 128 letters, digits, '.', '_', '-'"
    )
    settings = read_settings(None, {}, {"DHS_SERVER_ADMIN_KEY": "0123456789abcdef"})
    assert "0123456789abcdef" not in str(settings) + str(settings.table())


def test_tls_needs_its_files_and_files_need_tls(tmp_path: Path) -> None:
    assert fault(flags={"server.grpc_use_ssl": True}).startswith("server.grpc_server_cert is not set: grpc_use_ssl")
    certificate = {"server.grpc_server_cert": str(tmp_path / "server.pem")}
    assert "would be ignored; set grpc_use_ssl" in fault(flags=certificate)
    assert "not a readable file" in fault(flags=certificate | {"server.grpc_use_ssl": True})


def test_every_setting_has_a_name_of_its_own_in_each_place_and_is_in_the_guide() -> None:
    assert len({flag_of(key) for key in FIELDS}) == len(FIELDS)
    assert len({variable_of(key) for key in FIELDS}) == len(FIELDS)
    guide = DOCS.read_text()
    missing = [key for key in FIELDS if f"| `{key.rpartition('.')[2]}` |" not in guide]
    assert missing == []
