"""API keys: the form, what is stored, and every reason to refuse one."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from billing import keys, organizations
from billing.models import ApiKey, Organization


def test_it_works(acme: Organization) -> None:
    key, secret = keys.issue(organization=acme, name="ci")
    caller, found = keys.authenticate(secret)
    assert found == key
    assert (caller.key_id, caller.organization_id) == (key.pk, acme.pk)
    assert caller.max_in_flight == acme.max_in_flight
    assert caller.has_credits


def test_the_form_is_prefix_randomness_checksum(acme: Organization) -> None:
    _, secret = keys.issue(organization=acme, name="ci")
    assert re.fullmatch(r"sk-bk-[0-9A-Za-z]{38}", secret)
    assert keys.is_well_formed(secret)
    assert not keys.is_well_formed(secret[:-1] + ("0" if secret[-1] != "0" else "1"))


def test_the_key_itself_is_not_stored(acme: Organization) -> None:
    key, secret = keys.issue(organization=acme, name="ci")
    row = ApiKey.objects.filter(pk=key.pk).values().get()
    assert secret not in map(str, row.values())
    assert row["last4"] == secret[-4:]
    assert bytes(row["digest"]) == keys.digest(secret)


def test_two_keys_differ(acme: Organization) -> None:
    secrets = {keys.issue(organization=acme, name=str(number))[1] for number in range(20)}
    assert len(secrets) == 20


@pytest.mark.parametrize("secret", ["", "sk-bk-", "sk-bk-" + "0" * 38, "nonsense", "é" * 44])
def test_a_malformed_key_is_refused_without_a_look_up(secret: str) -> None:
    with pytest.raises(keys.KeyInvalid):  # without the `db` fixture a query would fail
        keys.authenticate(secret)


def test_an_unknown_key_is_refused(acme: Organization) -> None:
    key, secret = keys.issue(organization=acme, name="ci")
    key.delete()
    with pytest.raises(keys.KeyInvalid):
        keys.authenticate(secret)


def test_a_revoked_key_is_refused_for_good(acme: Organization) -> None:
    key, secret = keys.issue(organization=acme, name="ci")
    keys.revoke(key)
    first = ApiKey.objects.get(pk=key.pk).revoked_at
    keys.revoke(key)
    keys.resume(key)
    assert ApiKey.objects.get(pk=key.pk).revoked_at == first
    with pytest.raises(keys.KeyInvalid):
        keys.authenticate(secret)


def test_a_paused_key_is_refused_until_it_is_resumed(acme: Organization) -> None:
    key, secret = keys.issue(organization=acme, name="ci")
    keys.pause(key)
    with pytest.raises(keys.KeyPaused):
        keys.authenticate(secret)
    keys.resume(key)
    keys.authenticate(secret)


def test_an_expired_key_is_refused(acme: Organization) -> None:
    past = timezone.now() - timedelta(seconds=1)
    _, secret = keys.issue(organization=acme, name="ci", expires_at=past)
    with pytest.raises(keys.KeyInvalid):
        keys.authenticate(secret)


def test_a_key_of_a_suspended_organization_is_refused_with_the_reason(acme: Organization) -> None:
    _, secret = keys.issue(organization=acme, name="ci")
    organizations.suspend(acme, reason="Invoice 7 is open.")
    with pytest.raises(keys.OrganizationSuspended, match=r"Invoice 7 is open\."):
        keys.authenticate(secret)


def test_a_live_name_is_taken_and_a_revoked_one_is_free(
    acme: Organization, globex: Organization
) -> None:
    key, _ = keys.issue(organization=acme, name="ci")
    with pytest.raises(keys.KeyNameTaken, match="acme has a live key named 'ci'"):
        keys.issue(organization=acme, name="ci")
    keys.issue(organization=globex, name="ci")
    keys.revoke(key)
    keys.issue(organization=acme, name="ci")


def test_last_used_is_written_once_a_minute(acme: Organization) -> None:
    key, secret = keys.issue(organization=acme, name="ci")
    keys.authenticate(secret)
    first = ApiKey.objects.get(pk=key.pk).last_used_at
    keys.authenticate(secret)
    assert first is not None
    assert ApiKey.objects.get(pk=key.pk).last_used_at == first


def test_the_caller_carries_the_allowed_models(acme: Organization) -> None:
    _, secret = keys.issue(organization=acme, name="ci", allowed_models=["qwen3-32b"])
    caller, _ = keys.authenticate(secret)
    assert caller.allowed_models == {"qwen3-32b"}


def test_the_caller_says_whether_there_are_credits(broke: Organization) -> None:
    _, secret = keys.issue(organization=broke, name="ci")
    assert not keys.authenticate(secret)[0].has_credits
    Organization.objects.filter(pk=broke.pk).update(overdraft_limit=1)
    assert keys.authenticate(secret)[0].has_credits
