"""Webhooks: signed JSON to an address that a customer chose. Billing's only outgoing HTTP.

The address is hostile until proven otherwise: it may name our own network, redirect there, resolve
to another host on the second look, or answer a byte at a time. So a connection goes only to an
address that was looked up and found public a moment before, follows no redirect, uses no proxy,
reads no body, and ends at its deadline.

The signature is that of the Standard Webhooks specification: HMAC-SHA256 with the secret over
`<webhook-id>.<webhook-timestamp>.<body>`.
"""

import base64
import hashlib
import hmac
import ipaddress
import secrets
import socket
import ssl
import time
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx
from django.conf import settings
from django.utils import timezone

DEADLINE_SECONDS = 10.0
_SECRET_PREFIX = "whsec_"  # noqa: S105  what secrets begin with, not one
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Python before 3.12.4 takes these for public.
_SPECIAL = (ipaddress.ip_network("192.0.0.0/24"), ipaddress.ip_network("64:ff9b:1::/48"))


class WebhookRefused(Exception):
    """The address cannot be a webhook; the text may be shown to whoever chose it."""


class WebhookFailed(Exception):
    """The webhook did not take it: no connection, no answer in time, or no 2xx."""


def new_secret() -> str:
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def refuse_bad_url(text: str) -> None:
    """Raise WebhookRefused for what cannot be a webhook's address, without any look-up."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        raise WebhookRefused("This is no URL.") from None
    schemes = {"https", "http"} if settings.KILN_WEBHOOK_PRIVATE else {"https"}
    if url.scheme not in schemes or not url.host:
        raise WebhookRefused("A webhook needs an https:// URL.")
    if url.userinfo or url.fragment:
        raise WebhookRefused("A webhook's URL has no user name, password or fragment.")
    try:
        literal = ipaddress.ip_address(url.host)
    except ValueError:
        return  # a name; what it resolves to is judged at each connection
    if not _may_connect_to(literal):
        raise WebhookRefused("A webhook needs a public address.")


def signature(secret: str, *, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header `webhook-signature`."""
    key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX))
    if not key:
        raise ValueError("A webhook is never signed with an empty secret.")
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def post(url: str, *, secret: str, message_id: str, body: bytes) -> None:
    """Send the body, signed. Raises WebhookFailed or WebhookRefused."""
    refuse_bad_url(url)
    timestamp = int(timezone.now().timestamp())
    headers = {
        "content-type": "application/json",
        "user-agent": f"Kiln/{settings.VERSION}",
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(
            secret, message_id=message_id, timestamp=timestamp, body=body
        ),
    }
    try:
        with (
            httpx.Client(
                transport=_GuardedTransport(), timeout=DEADLINE_SECONDS, follow_redirects=False
            ) as client,
            client.stream("POST", url, content=body, headers=headers) as answer,
        ):
            status = answer.status_code
    except (httpx.HTTPError, httpx.InvalidURL) as failure:
        raise WebhookFailed(type(failure).__name__) from failure
    if not 200 <= status < 300:
        raise WebhookFailed(f"status {status}")


def _trust() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


class _GuardedTransport(httpx.HTTPTransport):
    """httpx's transport on a network where only public addresses exist."""

    def __init__(self) -> None:
        trust = _trust()
        super().__init__(verify=trust, trust_env=False)
        self._pool = httpcore.ConnectionPool(ssl_context=trust, network_backend=_PublicNetwork())


class _PublicNetwork(httpcore.NetworkBackend):
    """Connects to the very address that it found public: a second look-up could say another."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        deadline = time.monotonic() + DEADLINE_SECONDS
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as failure:
            raise httpcore.ConnectError(str(failure)) from failure
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        if not all(_may_connect_to(ipaddress.ip_address(each)) for each in addresses):
            raise WebhookRefused(f"{host} is not a public address.")
        return _UntilDeadline(_connect_to_any(addresses, port, deadline), deadline)


def _connect_to_any(addresses: list[str], port: int, deadline: float) -> httpcore.NetworkStream:
    """Connect to the first address that answers: a host may have some that we have no route to."""
    failure: Exception = httpcore.ConnectError("no address")
    for address in addresses:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            return httpcore.SyncBackend().connect_tcp(address, port, timeout=left)
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as refused:
            failure = refused
    raise failure


class _UntilDeadline(httpcore.NetworkStream):
    """A stream that ends at its deadline, however often its reader gets a byte before."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("the deadline has passed")
        return left

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._left())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        secured = self._stream.start_tls(ssl_context, server_hostname, self._left())
        return _UntilDeadline(secured, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _may_connect_to(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return bool(settings.KILN_WEBHOOK_PRIVATE) or _is_public(address)


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        # An IPv4 address that is written, tunnelled or translated as IPv6 is judged as itself.
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(inner)
        if address.teredo is not None:
            return False
    if any(address in network for network in _SPECIAL):
        return False
    return address.is_global and not address.is_multicast
