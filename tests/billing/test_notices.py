"""Notices: once per crossing, by mail and by signed webhook, tried again when they fail."""

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.core import mail
from django.db import IntegrityError, transaction
from django.utils import timezone

from billing import keys, notices, tasks
from billing.models import ApiKey, Membership, Notice, Organization
from tests.billing.receiver import Receiver
from tests.billing.world import line


@pytest.fixture
def receiver(settings: Any) -> Iterator[Receiver]:
    """A webhook on this machine, which the tests' settings allow."""
    settings.KILN_WEBHOOK_PRIVATE = True
    with Receiver() as running:
        yield running


@pytest.fixture
def acme(acme: Organization, django_user_model: Any) -> Organization:
    """Acme has 10 USD, wants to be told below 5, and is owned by ada; victor only looks."""
    for email, role in (("ada@acme.test", "owner"), ("victor@acme.test", "viewer")):
        person = django_user_model.objects.create_user(email)
        Membership.objects.create(user=person, organization=acme, role=role)
    notices.direct(acme, low_balance=Decimal(5), webhook_url="")
    return acme


def spend(organization: Organization, amount: str) -> None:
    line(organization, -Decimal(amount))


def later(*, minutes: float) -> None:
    """Let all attempts so far lie so far back."""
    for notice in Notice.objects.exclude(attempted_at=None):
        notice.attempted_at = (notice.attempted_at or timezone.now()) - timedelta(minutes=minutes)
        notice.save(update_fields=["attempted_at"])


def told() -> list[str]:
    return [str(message.subject) for message in mail.outbox]


# --- Crossings -----------------------------------------------------------------------------------


def test_the_owners_are_told_of_a_low_balance_once(acme: Organization) -> None:
    tasks.send_notices()
    assert told() == []
    spend(acme, "5.000000000001")
    for _ in range(3):
        tasks.send_notices()
        later(minutes=60)
    [message] = mail.outbox
    assert message.to == ["ada@acme.test"]
    assert message.subject == "The balance of Acme is low"
    assert "4.999999999999 USD, below the 5 USD" in str(message.body)
    notice = Notice.objects.get()
    assert (notice.attempts, notice.mailed_at is None) == (1, False)


def test_a_balance_at_its_threshold_is_not_below_it(acme: Organization) -> None:
    spend(acme, "5")
    tasks.send_notices()
    assert told() == []


def test_a_balance_that_swings_around_its_threshold_crosses_once(acme: Organization) -> None:
    spend(acme, "6")
    for amount in ("-1.5", "1.5", "-2", "2"):  # up to the 6 that are 120 %, and down to 4
        tasks.send_notices()
        spend(acme, amount)
    tasks.send_notices()
    assert len(told()) == 1
    spend(acme, "-2.000000000001")  # above 120 %
    tasks.send_notices()
    assert Notice.objects.get().cleared_at is not None
    spend(acme, "2")
    tasks.send_notices()
    assert len(told()) == 2


def test_without_a_threshold_nothing_is_low(acme: Organization) -> None:
    spend(acme, "6")
    tasks.send_notices()
    notices.direct(acme, low_balance=None, webhook_url="")
    tasks.send_notices()
    assert Notice.objects.get().cleared_at is not None
    spend(acme, "100")
    tasks.send_notices()
    assert len(told()) == 1


def test_a_threshold_of_zero_is_one(acme: Organization) -> None:
    notices.direct(acme, low_balance=Decimal(0), webhook_url="")
    spend(acme, "10")
    tasks.send_notices()
    assert told() == []
    spend(acme, "0.000000000001")
    tasks.send_notices()
    assert len(told()) == 1


def expire(key: ApiKey, days: float) -> None:
    ApiKey.objects.filter(pk=key.pk).update(expires_at=timezone.now() + timedelta(days=days))


def test_a_key_that_expires_is_told_of_once(acme: Organization, key: ApiKey) -> None:
    expire(key, 7.01)
    tasks.send_notices()
    assert told() == []
    expire(key, 6.99)
    for _ in range(3):
        tasks.send_notices()
        later(minutes=60)
    [message] = mail.outbox
    assert message.subject == "An API key of Acme expires soon"
    assert str(key) in str(message.body)
    assert "refused with 401" in str(message.body)
    expire(key, 30)  # put off: the next time is another crossing
    tasks.send_notices()
    expire(key, 5)
    tasks.send_notices()
    assert len(told()) == 2


def test_each_key_is_told_of_by_itself(acme: Organization, key: ApiKey) -> None:
    other, _ = keys.issue(organization=acme, name="other")
    expire(key, 1)
    expire(other, 2)
    tasks.send_notices()
    assert len(told()) == 2


def test_a_key_that_is_revoked_or_has_expired_is_not_told_of(
    acme: Organization, key: ApiKey
) -> None:
    expire(key, -0.01)
    tasks.send_notices()
    expire(key, 1)
    keys.revoke(key)
    tasks.send_notices()
    assert told() == []
    assert list(notices.expiring_keys(acme)) == []


def test_the_database_keeps_one_notice_of_a_crossing(acme: Organization) -> None:
    fields = {"organization": acme, "kind": "low_balance", "crossed_at": timezone.now()}
    Notice.objects.create(**fields)
    with pytest.raises(IntegrityError), transaction.atomic():
        Notice.objects.create(**fields)


# --- The webhook ---------------------------------------------------------------------------------


def test_the_webhook_gets_it_signed(acme: Organization, receiver: Receiver) -> None:
    secret = notices.direct(acme, low_balance=Decimal(5), webhook_url=f"{receiver.url}/hook")
    assert secret
    spend(acme, "6.5")
    for _ in range(2):
        tasks.send_notices()
        later(minutes=60)
    [got] = receiver.requests
    notice = Notice.objects.get()
    assert notice.delivered_at is not None
    assert json.loads(got.body) == {
        "type": "low_balance",
        "timestamp": notice.crossed_at.isoformat().replace("+00:00", "Z"),
        "data": {"organization": "acme", "balance": "3.5", "low_balance": "5"},
    }
    assert got.headers["webhook-id"] == f"notice-{notice.pk}"
    signed = f"notice-{notice.pk}.{got.headers['webhook-timestamp']}.".encode() + got.body
    made = hmac.digest(base64.b64decode(secret.removeprefix("whsec_")), signed, hashlib.sha256)
    assert got.headers["webhook-signature"] == "v1," + base64.b64encode(made).decode()


def test_the_webhook_gets_keys_that_expire(
    acme: Organization, key: ApiKey, receiver: Receiver
) -> None:
    notices.direct(acme, low_balance=None, webhook_url=receiver.url)
    expire(key, 3)
    tasks.send_notices()
    [got] = receiver.requests
    data = json.loads(got.body)["data"]
    assert data["key"] == {"name": "default", "prefix": "sk-bk-", "last4": key.last4}
    assert data["expires_at"].endswith("Z")


def test_what_failed_is_tried_again_at_growing_intervals_and_then_no_more(
    acme: Organization, receiver: Receiver
) -> None:
    notices.direct(acme, low_balance=Decimal(5), webhook_url=receiver.url)
    receiver.status = 503
    spend(acme, "6")
    pause = 5.0
    for attempt in range(1, notices.ATTEMPTS_MAX + 1):
        tasks.send_notices()
        later(minutes=pause - 1)
        tasks.send_notices()  # not yet
        assert len(receiver.requests) == attempt
        later(minutes=1)
        pause *= 2
    later(minutes=100_000)
    tasks.send_notices()
    notice = Notice.objects.get()
    assert (notice.attempts, notice.delivered_at) == (notices.ATTEMPTS_MAX, None)
    assert len(receiver.requests) == notices.ATTEMPTS_MAX
    assert len({got.headers["webhook-id"] for got in receiver.requests}) == 1
    assert len(told()) == 1  # the mail had arrived


def test_a_webhook_that_recovers_gets_it(acme: Organization, receiver: Receiver) -> None:
    notices.direct(acme, low_balance=Decimal(5), webhook_url=receiver.url)
    receiver.status = 500
    spend(acme, "6")
    tasks.send_notices()
    receiver.status = 200
    later(minutes=5)
    tasks.send_notices()
    later(minutes=60)
    tasks.send_notices()
    assert Notice.objects.get().attempts == 2
    assert len(receiver.requests) == 2


def test_of_two_processes_one_sends(
    acme: Organization, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices.direct(acme, low_balance=Decimal(5), webhook_url=receiver.url)
    spend(acme, "6")
    notices.look()
    unsent = list(notices._unsent().select_related("organization__account"))
    tasks.send_notices()
    # The other one had read the same list before.
    monkeypatch.setattr(notices, "_unsent", lambda: _Listed(unsent))
    notices.send()
    assert (len(receiver.requests), len(told())) == (1, 1)


class _Listed:
    def __init__(self, rows: list[Notice]) -> None:
        self._rows = rows

    def select_related(self, *_: str) -> list[Notice]:
        return self._rows


def test_a_webhook_that_turned_private_is_not_called(
    acme: Organization, receiver: Receiver, settings: Any
) -> None:
    notices.direct(acme, low_balance=Decimal(5), webhook_url=receiver.url)
    settings.KILN_WEBHOOK_PRIVATE = False
    spend(acme, "6")
    tasks.send_notices()
    assert receiver.requests == []
    assert Notice.objects.get().delivered_at is None
    assert len(told()) == 1


def test_a_crossing_that_is_over_is_no_longer_sent(acme: Organization, receiver: Receiver) -> None:
    notices.direct(acme, low_balance=Decimal(5), webhook_url=receiver.url)
    receiver.status = 500
    spend(acme, "6")
    tasks.send_notices()
    spend(acme, "-100")
    later(minutes=60)
    tasks.send_notices()
    assert len(receiver.requests) == 1


# --- Mail ----------------------------------------------------------------------------------------


def test_a_mail_server_that_is_away_is_tried_again(acme: Organization, settings: Any) -> None:
    settings.EMAIL_BACKEND = "tests.billing.test_notices.Unreachable"
    spend(acme, "6")
    tasks.send_notices()
    assert Notice.objects.get().mailed_at is None
    settings.EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
    later(minutes=5)
    tasks.send_notices()
    assert len(told()) == 1


class Unreachable:
    def __init__(self, **_: Any) -> None:
        pass

    def send_messages(self, _: Any) -> int:
        raise ConnectionRefusedError("no mail server")


def test_who_left_or_is_disabled_is_not_mailed(
    acme: Organization, django_user_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    django_user_model.objects.filter(email="ada@acme.test").update(is_active=False)
    spend(acme, "6")
    tasks.send_notices()
    assert told() == []
    assert "acme has no owner to mail" in caplog.text


def test_a_name_cannot_write_headers(acme: Organization) -> None:
    Organization.objects.filter(pk=acme.pk).update(name="Acme\r\nBcc: all@acme.test")
    spend(acme, "6")
    tasks.send_notices()
    assert told() == ["The balance of Acme Bcc: all@acme.test is low"]
    assert mail.outbox[0].recipients() == ["ada@acme.test"]


# --- Where they go -------------------------------------------------------------------------------


def test_a_secret_is_made_with_each_new_url_and_goes_with_it(acme: Organization) -> None:
    def direct(url: str, **more: Any) -> str | None:
        return notices.direct(acme, low_balance=None, webhook_url=url, **more)

    first = direct("https://a.test/")
    assert acme.webhook_secret == first
    assert direct("https://a.test/") is None
    assert acme.webhook_secret == first
    second = direct("https://b.test/")
    third = direct("https://b.test/", new_secret=True)
    assert len({first, second, third, None}) == 4
    assert direct("", new_secret=True) is None
    assert acme.webhook_secret == ""


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("low_balance", {"low_balance": Decimal(-1)}),
        ("low_balance", {"low_balance": Decimal(9_000_001)}),
        ("low_balance", {"low_balance": Decimal("0.0000000000001")}),
        ("webhook_url", {"webhook_url": "http://a.test/"}),
        ("webhook_url", {"webhook_url": "https://10.0.0.1/"}),
        ("webhook_url", {"webhook_url": "https://a.test/" + "x" * 500}),
    ],
)
def test_what_does_not_fit_is_refused_with_its_name(
    acme: Organization, field: str, values: dict[str, Any]
) -> None:
    with pytest.raises(notices.NoticesRefused) as refusal:
        notices.direct(acme, **{"low_balance": None, "webhook_url": "", **values})
    assert refusal.value.field == field
    assert Organization.objects.get(pk=acme.pk).low_balance == 5
