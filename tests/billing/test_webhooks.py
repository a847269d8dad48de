"""Webhooks: signed as the specification says, to public addresses only, within a deadline."""

import base64
import hashlib
import hmac
import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from billing import webhooks
from tests.billing.receiver import Receiver
from tests.requirements import require

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


@pytest.fixture
def private_allowed(settings: Any) -> None:
    settings.KILN_WEBHOOK_PRIVATE = True


def post(url: str, body: bytes = b"{}") -> None:
    webhooks.post(url, secret=SECRET, message_id="notice-1", body=body)


def test_the_signature_is_that_of_the_specification() -> None:
    # The example of standard-webhooks.md.
    assert (
        webhooks.signature(
            SECRET,
            message_id="msg_p5jXN8AQM9LWM0D4loKWxJek",
            timestamp=1614265330,
            body=b'{"test": 2432232314}',
        )
        == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    )


def test_a_receiver_can_verify_it(receiver: Receiver, private_allowed: None) -> None:
    post(f"{receiver.url}/hook?x=1", b'{"a": "\xc3\xa9"}')
    [got] = receiver.requests
    assert (got.method, got.path, got.body) == ("POST", "/hook?x=1", b'{"a": "\xc3\xa9"}')
    assert got.headers["content-type"] == "application/json"
    assert got.headers["webhook-id"] == "notice-1"
    signed = f"notice-1.{got.headers['webhook-timestamp']}.".encode() + got.body
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    expected = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    assert got.headers["webhook-signature"] == f"v1,{expected}"


def test_a_secret_is_long_and_new_and_never_empty() -> None:
    secrets = {webhooks.new_secret() for _ in range(10)}
    assert len(secrets) == 10
    assert all(len(base64.b64decode(each.removeprefix("whsec_"))) == 32 for each in secrets)
    with pytest.raises(ValueError, match="empty secret"):
        webhooks.signature("whsec_", message_id="x", timestamp=1, body=b"")


@pytest.mark.parametrize("status", [300, 302, 307, 400, 404, 500, 503])
def test_whatever_is_no_2xx_is_a_failure(
    receiver: Receiver, private_allowed: None, status: int
) -> None:
    receiver.status, receiver.location = status, f"{receiver.url}/elsewhere"
    with pytest.raises(webhooks.WebhookFailed, match=f"status {status}"):
        post(receiver.url)
    assert [each.path for each in receiver.requests] == ["/"]  # no redirect is followed


def test_nobody_there_is_a_failure(private_allowed: None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        with pytest.raises(webhooks.WebhookFailed, match="ConnectError"):
            post(f"http://127.0.0.1:{taken.getsockname()[1]}/")


def test_a_name_that_does_not_resolve_is_a_failure(
    private_allowed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nothing)
    with pytest.raises(webhooks.WebhookFailed, match="ConnectError"):
        post("http://receiver.test/")


def test_an_answer_a_byte_at_a_time_ends_at_the_deadline(
    receiver: Receiver, private_allowed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "DEADLINE_SECONDS", 0.5)
    receiver.drips = True
    with pytest.raises(webhooks.WebhookFailed, match="Timeout"):
        post(receiver.url)


# --- Addresses -----------------------------------------------------------------------------------

PRIVATE = [
    *("127.0.0.1", "127.1.2.3", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
    *("0.0.0.0", "100.64.0.1", "192.0.0.8", "198.18.0.1", "224.0.0.1", "240.0.0.1"),
    *("255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1"),
    *("::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:a00:1::"),
    *("2001:db8::1", "2001:0:7f00:1::", "64:ff9b:1::1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_is_refused_when_it_is_written(address: str) -> None:
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(webhooks.WebhookRefused, match="public address"):
        webhooks.refuse_bad_url(f"https://{host}/hook")


@pytest.mark.parametrize("address", PRIVATE)
def test_a_name_that_resolves_to_a_private_address_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, "93.184.216.34", address)
    with pytest.raises(webhooks.WebhookRefused, match="is not a public address"):
        post("https://receiver.test/")


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Let every name have these addresses, and return the list of names that are asked for."""
    asked: list[str] = []
    really = socket.getaddrinfo

    def answer(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        if not host.endswith(".test"):
            return really(host, port, *args, **options)
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return asked


def test_the_address_that_was_judged_is_the_one_that_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = resolve_to(monkeypatch, "93.184.216.34")
    connected: list[str] = []

    def connect(address: tuple[str, int], *_: Any, **__: Any) -> socket.socket:
        connected.append(address[0])
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(webhooks.WebhookFailed):
        post("https://receiver.test/")
    assert (asked, connected) == (["receiver.test"], ["93.184.216.34"])


def test_an_address_without_an_answer_is_not_the_last(
    receiver: Receiver, private_allowed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, "127.0.0.2", "127.0.0.1")  # the receiver listens on the second only
    post(f"http://receiver.test:{receiver.port}/")
    assert len(receiver.requests) == 1


def test_localhost_is_not_reached_by_name(receiver: Receiver) -> None:
    with pytest.raises(webhooks.WebhookRefused):
        post(f"https://localhost:{receiver.port}/")
    assert receiver.requests == []


@pytest.mark.parametrize(
    "url",
    [
        *("", "receiver.test", "//receiver.test/", "http://receiver.test/", "ftp://receiver.test/"),
        *("file:///etc/passwd", "https://", "https:///x", "https://user@receiver.test/"),
        *(
            "https://user:pw@receiver.test/",
            "https://receiver.test/#x",
            "https://[::1",
            "https://a:b/",
        ),
        *("https://receiver.test/\r\nX: y", "javascript:alert(1)", "https://127.0.0.1\\@x/"),
    ],
)
def test_what_is_no_webhooks_url(url: str) -> None:
    with pytest.raises(webhooks.WebhookRefused):
        webhooks.refuse_bad_url(url)


@pytest.mark.parametrize(
    "url", ["https://receiver.test/a?b=c", "https://93.184.216.34:8443/", "https://[2606:4700::1]/"]
)
def test_what_is_one(url: str) -> None:
    webhooks.refuse_bad_url(url)


@pytest.mark.parametrize("proxy", ["HTTPS_PROXY", "ALL_PROXY", "HTTP_PROXY"])
def test_no_proxy_of_the_environment_is_used(
    receiver: Receiver, private_allowed: None, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    post(receiver.url)
    assert len(receiver.requests) == 1


# --- TLS -----------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of `localhost`, signed by itself."""
    require("openssl")
    made = tmp_path / "both.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    command += f" -addext subjectAltName=DNS:localhost -keyout {made} -out {tmp_path / 'cert.pem'}"
    subprocess.run(command.split(), check=True, capture_output=True)
    made.write_bytes(made.read_bytes() + (tmp_path / "cert.pem").read_bytes())
    return made


def test_a_receiver_is_known_by_its_name(
    certificate: Path, private_allowed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Receiver(certificate=certificate) as receiver:
        with pytest.raises(webhooks.WebhookFailed, match="ConnectError"):
            post(f"https://localhost:{receiver.port}/")  # nobody vouches for it
        trust = ssl.create_default_context(cafile=str(certificate))
        monkeypatch.setattr(webhooks, "_trust", lambda: trust)
        post(f"https://localhost:{receiver.port}/", json.dumps({}).encode())
        with pytest.raises(webhooks.WebhookFailed, match="ConnectError"):
            post(f"https://127.0.0.1:{receiver.port}/")  # its certificate has another name
        assert len(receiver.requests) == 1
