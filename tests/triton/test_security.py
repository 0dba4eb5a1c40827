"""Who may do what: administrative calls need the key, TLS where it is asked for."""

from __future__ import annotations

import http.client
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.triton.clients import Stream, make_inputs
from tests.triton.echo import serving
from trt_backend.config import LOOPBACK
from trt_backend.triton.canary import ADMIN_HEADER
from trt_backend.triton.launcher import TritonServer

ADMINISTRATIVE_CALLS = [
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/echo/unload"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("GET", "/v2/trace/setting"),
    ("GET", "/v2/logging"),
]
OPEN_CALLS = ["/v2/health/live", "/v2/health/ready", "/v2", "/v2/models/echo", "/v2/models/echo/config"]


def status_of(server: TritonServer, method: str, path: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection(str(LOOPBACK), server.config.http_port, timeout=10.0)
    connection.request(method, path, "{}" if method == "POST" else None, headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_administrative_calls_need_the_key_from_its_file_and_others_do_not(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        file = server._folder.admin_key
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        key = file.read_text().strip()
        assert len(key) == 32
        assert key not in server._folder.log.read_text(errors="replace")
        for method, path in ADMINISTRATIVE_CALLS:
            assert status_of(server, method, path, {}) == 403, path
            assert status_of(server, method, path, {ADMIN_HEADER: "wrong"}) == 403, path
            assert status_of(server, method, path, {ADMIN_HEADER: key}) != 403, path
        assert status_of(server, "POST", "/v2/repository/index", {ADMIN_HEADER: key}) == 200
        assert [status_of(server, "GET", path, {}) for path in OPEN_CALLS] == [200] * len(OPEN_CALLS)
        client = grpcclient.InferenceServerClient(f"{LOOPBACK}:{server.config.grpc_port}")
        with pytest.raises(InferenceServerException, match="This protocol is restricted"):
            client.get_model_repository_index()
        headers = {f"triton-grpc-protocol-{ADMIN_HEADER}": key}
        assert client.get_model_repository_index(headers=headers).models[0].name == "echo"
        assert client.is_server_ready()
        assert client.get_model_metadata("echo").name == "echo"
        client.close()
        assert Stream(server.config.grpc_port, "echo", make_inputs(b"x")).rest().text == "x"


def test_health_and_inference_can_be_restricted_too_and_our_own_canary_has_the_key(tmp_path: Path) -> None:
    key = "key-of-the-operator"
    with serving(tmp_path, restricted_protocols="health,inference", admin_key=key) as server:
        assert server._folder.admin_key.read_text() == key + "\n"
        assert status_of(server, "GET", "/v2/health/ready", {}) == 403
        assert status_of(server, "GET", "/v2/health/ready", {ADMIN_HEADER: key}) == 200
        assert status_of(server, "POST", "/v2/models/echo/infer", {}) == 403


def test_grpc_speaks_tls_with_the_certificate_that_was_given(tmp_path: Path) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    make_certificate(certificate, key)
    files = {"grpc_server_cert": certificate, "grpc_server_key": key}
    with serving(tmp_path, grpc_use_ssl=True, **files) as server:
        url = f"localhost:{server.config.grpc_port}"
        client = grpcclient.InferenceServerClient(url, ssl=True, root_certificates=str(certificate))
        assert client.is_model_ready("echo")
        client.close()
        plain = grpcclient.InferenceServerClient(url)
        with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            plain.is_server_live()
        plain.close()


def make_certificate(certificate: Path, key: Path) -> None:
    """A self-signed one for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine to make a certificate with")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
