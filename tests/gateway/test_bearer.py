"""Where a request may carry its key, and where it may not."""

import pytest

from gateway.bearer import secret_from
from gateway.errors import InvalidApiKey

KEY = b"sk-bk-abc"
AUTHORIZATION = (b"authorization", b"Bearer " + KEY)


def test_it_works() -> None:
    assert secret_from([(b"host", b"api"), AUTHORIZATION], b"") == "sk-bk-abc"


@pytest.mark.parametrize(
    "value", [b"bearer sk-bk-abc", b"BEARER sk-bk-abc", b"  Bearer   sk-bk-abc  "]
)
def test_case_and_blanks_do_not_matter(value: bytes) -> None:
    assert secret_from([(b"authorization", value)], b"") == "sk-bk-abc"


def test_x_api_key_counts_without_an_authorization_header() -> None:
    assert secret_from([(b"x-api-key", b" sk-bk-abc ")], b"") == "sk-bk-abc"
    assert secret_from([(b"x-api-key", b"another"), AUTHORIZATION], b"") == "sk-bk-abc"


def test_the_same_key_twice_is_one_key() -> None:
    assert secret_from([AUTHORIZATION, AUTHORIZATION], b"") == "sk-bk-abc"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", KEY)],
        [(b"authorization", b"Basic " + KEY)],
        [(b"authorization", "Bearer sk-bk-\N{LATIN SMALL LETTER E WITH ACUTE}".encode())],
        [(b"authorization", b"Bearer sk-bk-\xff")],
        [(b"x-api-key", b"")],
        [AUTHORIZATION, (b"authorization", b"Bearer another")],
        [(b"x-api-key", b"one"), (b"x-api-key", b"two")],
        # A bad Authorization header is not made good by another header.
        [(b"authorization", b"Basic abc"), (b"x-api-key", KEY)],
    ],
)
def test_it_refuses(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(InvalidApiKey) as refusal:
        secret_from(headers, b"")
    assert "sk-bk" not in refusal.value.message


@pytest.mark.parametrize(
    "query", [b"api_key=sk-bk-abc", b"a=1&KEY=x", b"access%5Ftoken=x", b"token=", b"apikey=\xff"]
)
def test_a_key_in_the_address_is_refused_even_beside_a_good_header(query: bytes) -> None:
    with pytest.raises(InvalidApiKey):
        secret_from([AUTHORIZATION], query)


def test_other_queries_pass() -> None:
    assert secret_from([AUTHORIZATION], b"limit=10&cursor=key") == "sk-bk-abc"
