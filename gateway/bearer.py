"""Where a request carries its API key.

Reads headers only; what the key is worth is for `billing.keys` to say.
"""

from collections.abc import Iterable
from urllib.parse import parse_qsl

from gateway.errors import InvalidApiKey

_QUERY_NAMES = {"api_key", "api-key", "apikey", "key", "token", "access_token", "authorization"}


def secret_from(headers: Iterable[tuple[bytes, bytes]], query: bytes) -> str:
    """Return the key that the request carries (beyond-the-page.md section 2).

    `headers` are ASGI's: lower-case names, raw values. The scheme's case and surrounding blanks
    do not matter; without an Authorization header `x-api-key` counts. Raises InvalidApiKey for no
    key, two different ones, another scheme, non-ASCII, or a key in the query string: an address
    ends up in logs, so a key in it must not work even when the header is good.
    """
    pairs = [(name, value.strip()) for name, value in headers]
    if query and _names_a_key(query):
        raise InvalidApiKey
    authorizations = {value for name, value in pairs if name == b"authorization"}
    if len(authorizations) > 1:
        raise InvalidApiKey
    if authorizations:
        scheme, _, secret = authorizations.pop().partition(b" ")
        if scheme.lower() != b"bearer":
            raise InvalidApiKey
    else:
        secrets = {value for name, value in pairs if name == b"x-api-key"}
        if len(secrets) != 1:
            raise InvalidApiKey
        secret = secrets.pop()
    secret = secret.strip()
    if not secret or not secret.isascii():
        raise InvalidApiKey
    return secret.decode("ascii")


def _names_a_key(query: bytes) -> bool:
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    return any(name.lower() in _QUERY_NAMES for name, _ in pairs)
