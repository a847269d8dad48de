"""The life of a key: rotation with overlap, expiry, pause, allow-lists, revocation."""

import json
from datetime import datetime, timedelta
from decimal import Decimal
from io import StringIO

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.utils import timezone

from billing import keys, organizations
from billing.models import ApiKey, GatewayWorker, Organization
from tests.billing.world import admission, admit, served

HOUR = timedelta(hours=1)


def end(key: ApiKey, at: datetime) -> None:
    ApiKey.objects.filter(pk=key.pk).update(expires_at=at)


def run(*arguments: str) -> str:
    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue().rstrip("\n")


# --- Rotation ------------------------------------------------------------------------------------


def test_both_keys_work_during_the_overlap(acme: Organization) -> None:
    old, old_secret = keys.issue(organization=acme, name="ci")
    new, new_secret = keys.rotate(old, HOUR)
    assert (new.name, new.organization) == ("ci", acme)
    assert keys.authenticate(new_secret)[0].key_id == new.pk
    assert keys.authenticate(old_secret)[0].key_id == old.pk
    old.refresh_from_db()
    assert old.name == f"ci (rotated, {old.pk})"
    assert old.expires_at is not None
    assert timedelta(minutes=59) < old.expires_at - timezone.now() <= HOUR
    end(old, timezone.now())
    with pytest.raises(keys.KeyInvalid):
        keys.authenticate(old_secret)
    keys.authenticate(new_secret)


def test_without_an_overlap_the_old_key_ends_at_once(acme: Organization) -> None:
    old, old_secret = keys.issue(organization=acme, name="ci")
    keys.rotate(old, timedelta(0))
    with pytest.raises(keys.KeyInvalid):
        keys.authenticate(old_secret)


def test_the_new_key_has_the_limits_of_the_old_one(
    acme: Organization, worker: GatewayWorker
) -> None:
    far = timezone.now() + timedelta(days=9)
    fields = {"allowed_models": ["qwen3-32b"], "spend_limit": Decimal(5), "spend_period": "week"}
    old, _ = keys.issue(organization=acme, name="ci", expires_at=far, **fields)
    served(old, worker)
    keys.pause(old)
    new, _ = keys.rotate(old, HOUR)
    new.refresh_from_db()
    assert {name: getattr(new, name) for name in fields} == fields
    assert new.expires_at == far
    assert new.paused_at is not None
    assert not new.spends.exists()


def test_a_rotation_never_lets_the_old_key_live_longer(acme: Organization) -> None:
    soon = timezone.now() + timedelta(minutes=5)
    old, _ = keys.issue(organization=acme, name="ci", expires_at=soon)
    keys.rotate(old, HOUR)
    assert ApiKey.objects.get(pk=old.pk).expires_at == soon


def test_a_key_is_rotated_again_and_again(acme: Organization) -> None:
    key, _ = keys.issue(organization=acme, name="x" * 100)
    for _ in range(3):
        key, _ = keys.rotate(key, HOUR)
    names = ApiKey.objects.filter(organization=acme).order_by("pk").values_list("name", flat=True)
    assert names[3] == "x" * 100
    assert len(set(names)) == 4
    assert max(map(len, names)) == 100


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_a_key_that_ended_has_no_successor(acme: Organization, how: str) -> None:
    key, _ = keys.issue(organization=acme, name="ci")
    if how == "revoked":
        keys.revoke(key)
    else:
        end(key, timezone.now())
    with pytest.raises(keys.KeyEnded, match="'ci' has ended"):
        keys.rotate(key, HOUR)
    assert ApiKey.objects.filter(organization=acme).count() == 1


def test_a_refused_rotation_changes_nothing(
    acme: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, secret = keys.issue(organization=acme, name="ci")
    taken, _ = keys.issue(organization=acme, name="taken")
    monkeypatch.setattr(keys, "_name_of_rotated", lambda _: "taken")
    with pytest.raises(keys.KeyNameTaken):
        keys.rotate(key, HOUR)
    same = keys.authenticate(secret)[1]
    assert (same.name, same.expires_at) == ("ci", None)
    assert ApiKey.objects.get(pk=taken.pk).name == "taken"


# --- What is refused at admission, whatever a cache said -----------------------------------------


def test_an_expiry_bites_at_admission(key: ApiKey, worker: GatewayWorker) -> None:
    end(key, timezone.now() + HOUR)
    assert admit(admission(key, worker)) == [None]
    end(key, timezone.now())
    [refusal] = admit(admission(key, worker))
    assert isinstance(refusal, keys.KeyInvalid)
    assert refusal.key == key


def test_a_suspension_bites_at_admission_and_tells_its_reason(
    acme: Organization, key: ApiKey, worker: GatewayWorker
) -> None:
    organizations.suspend(acme, reason="Invoice 7 is open.")
    [refusal] = admit(admission(key, worker))
    assert isinstance(refusal, keys.OrganizationSuspended)
    assert (str(refusal), refusal.key) == ("Invoice 7 is open.", key)
    organizations.activate(acme)
    assert admit(admission(key, worker)) == [None]


def test_an_allow_list_bites_at_admission(key: ApiKey, worker: GatewayWorker) -> None:
    ApiKey.objects.filter(pk=key.pk).update(allowed_models=["gpt-oss-120b"])
    refusal, nothing = admit(admission(key, worker), admission(key, worker, model="gpt-oss-120b"))
    assert isinstance(refusal, keys.ModelNotAllowed)
    assert str(refusal) == "qwen3-32b"
    assert nothing is None


def test_a_refusal_says_whose_key_it_was(acme: Organization) -> None:
    key, secret = keys.issue(organization=acme, name="ci")
    keys.revoke(key)
    with pytest.raises(keys.KeyInvalid) as known:
        keys.authenticate(secret)
    assert known.value.key == key
    with pytest.raises(keys.KeyInvalid) as unknown:
        keys.authenticate("sk-bk-" + "0" * 38)
    assert unknown.value.key is None


# --- Commands ------------------------------------------------------------------------------------


def test_rotate_key(acme: Organization) -> None:
    old, _ = keys.issue(organization=acme, name="ci")
    told = json.loads(run("rotate_key", "Acme", "ci", "--overlap-hours", "2", "--json"))
    assert keys.authenticate(told["key"])[1].name == told["name"] == "ci"
    assert told["last4"] == told["key"][-4:]
    old.refresh_from_db()
    assert (told["old_name"], told["old_last4"]) == (old.name, old.last4)
    assert old.expires_at is not None
    assert told["old_expires_at"] == f"{old.expires_at:%Y-%m-%dT%H:%M:%SZ}"
    sentence = run("rotate_key", "acme", "ci")
    assert sentence.startswith("Key 'ci' of acme, shown this once: sk-bk-")
    assert f"(the old one, …{told['last4']}, works until " in sentence


def test_revoke_key(acme: Organization) -> None:
    key, secret = keys.issue(organization=acme, name="ci")
    assert json.loads(run("revoke_key", "Acme", "ci", "--json")) == {
        "organization": "acme",
        "name": "ci",
        "last4": key.last4,
    }
    with pytest.raises(keys.KeyInvalid):
        keys.authenticate(secret)
    again, _ = keys.issue(organization=acme, name="ci")
    assert run("revoke_key", "acme", "ci") == f"Revoked 'ci' of acme (…{again.last4})."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rotate_key", "acme", "none"], "acme has no live key named 'none'"),
        (["revoke_key", "acme", "none"], "acme has no live key named 'none'"),
        (["rotate_key", "nobody", "ci"], "No organization has the name or slug 'nobody'"),
        (["revoke_key", "nobody", "ci"], "No organization has the name or slug 'nobody'"),
        (["rotate_key", "acme", "ci", "--overlap-hours=-1"], "from 0 to 8760"),
        (["rotate_key", "acme", "ci", "--overlap-hours=8761"], "from 0 to 8760"),
        (["rotate_key", "acme", "old"], "'old' has ended"),
    ],
)
def test_a_command_says_why_it_did_nothing(
    acme: Organization, arguments: list[str], message: str
) -> None:
    keys.issue(organization=acme, name="ci")
    keys.issue(organization=acme, name="old", expires_at=timezone.now())
    with pytest.raises(CommandError, match=message):
        run(*arguments)
    assert ApiKey.objects.filter(organization=acme, revoked_at=None).count() == 2
