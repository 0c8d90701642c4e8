"""--ssl-cert-reqs 2: only clients with a certificate of our authority get in."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_under_test import ServerProcess


def openssl(*words: str) -> None:
    try:
        subprocess.run(["openssl", *words], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl on this machine to make certificates with")


def make_certificate(folder: Path, name: str, authority: str | None = None) -> Path:
    """`name`.pem with certificate and key, signed by `authority` or by itself."""
    cert, key, both = folder / f"{name}.crt", folder / f"{name}.key", folder / f"{name}.pem"
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    signer = (
        []
        if authority is None
        else ["-CA", str(folder / f"{authority}.crt"), "-CAkey", str(folder / f"{authority}.key")]
    )
    extra = ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]  # Python 3.13 asks for it
    extra += ["-addext", "subjectAltName=IP:127.0.0.1"] if authority else []
    openssl("req", "-x509", *new, *signer, *extra, "-keyout", str(key), "-out", str(cert))
    both.write_text(cert.read_text() + key.read_text())
    return both


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name, authority in (
        ("ours", None),
        ("theirs", None),
        ("server", "ours"),
        ("friend", "ours"),
        ("stranger", "theirs"),
    ):
        make_certificate(folder, name, authority)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    server = ServerProcess(
        "gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0", "--ssl-certfile", str(folder / "server.pem"),
        "--ssl-ca-certs", str(folder / "ours.crt"), "--ssl-cert-reqs", "2",
    )  # fmt: skip
    yield server.wait_for(r"Serving \S+ on (https://\S+)$")[1]
    server.close()


def ask(url: str, folder: Path, certificate: str | None) -> int:
    context = ssl.create_default_context(cafile=str(folder / "ours.crt"))
    if certificate is not None:
        context.load_cert_chain(folder / f"{certificate}.pem")
    with httpx.Client(verify=context) as client:
        return client.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code


def test_a_certificate_of_our_authority_gets_in(url: str, folder: Path) -> None:
    assert ask(url, folder, "friend") == 200


@pytest.mark.parametrize("certificate", [None, "stranger", "theirs"])
def test_no_certificate_and_one_of_somebody_else_do_not(url: str, folder: Path, certificate: str | None) -> None:
    with pytest.raises(httpx.TransportError):
        ask(url, folder, certificate)
    assert ask(url, folder, "friend") == 200
