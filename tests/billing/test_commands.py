"""The commands of billing, as an operator and as a script meet them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from billing import keys
from billing.models import ApiKey, CreditAccount, GatewayWorker, Organization
from tests.billing.world import admission, admit, served, silence

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str) -> str:
    """Return what the command prints, which is one line."""
    out = StringIO()
    call_command(*arguments, stdout=out)
    text = out.getvalue()
    assert text.count("\n") == 1
    return text.rstrip("\n")


def facts(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return found


def test_create_organization(db: None) -> None:
    assert run("create_organization", "Acme Inc.", "--credits", "10.5") == (
        "Created acme-inc with a balance of 10.5 USD."
    )
    assert run("create_organization", "Acme Inc.", "--credits", "99") == (
        "acme-inc exists; nothing was changed. Its balance is 10.5 USD."
    )
    assert facts("create_organization", "acme-inc", "--max-in-flight", "2") == {
        "organization": "acme-inc",
        "name": "Acme Inc.",
        "created": False,
        "balance": "10.5",
        "max_in_flight": 8,
    }
    assert facts("create_organization", "Other", "--max-in-flight", "2")["max_in_flight"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-5", "plain digits"),
        ("NaN", "plain digits"),
        ("1e3", "plain digits"),
        ("1_000", "plain digits"),
        ("10,5", "plain digits"),
        ("٣", "plain digits"),
        ("", "plain digits"),
        ("0.1234567890123", "more than 12 decimals"),
        ("9000001", "more than one amount can be"),
    ],
)
def test_a_bad_amount_gets_a_clear_message(db: None, text: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run("create_organization", "Acme", f"--credits={text}")
    assert not Organization.objects.filter(slug="acme").exists()


def test_issue_key(acme: Organization) -> None:
    told = facts("issue_key", "Acme", "--name", "ci")
    assert keys.authenticate(told["key"])[1].name == "ci"
    assert told["organization"] == "acme"
    assert told["last4"] == told["key"][-4:]
    assert run("issue_key", "acme").startswith("Key 'default' of acme, shown this once: sk-bk-")


def test_issue_key_fails_on_a_live_name(acme: Organization) -> None:
    told = facts("issue_key", "acme")
    with pytest.raises(CommandError, match="acme has a live key named 'default'"):
        run("issue_key", "acme")
    keys.revoke(keys.authenticate(told["key"])[1])
    assert facts("issue_key", "acme")["key"] != told["key"]


@pytest.mark.parametrize("name", ["", "x" * 101])
def test_issue_key_refuses_a_name_that_does_not_fit(acme: Organization, name: str) -> None:
    with pytest.raises(CommandError, match="--name"):
        run("issue_key", "acme", f"--name={name}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["issue_key", "nobody"],
        ["grant_credits", "nobody", "5", "--reason=r", "--idempotency-key=k"],
        ["record_purchase", "nobody", "5", "--reason=r", "--idempotency-key=k"],
        ["adjust_credits", "nobody", "5", "--reason=r", "--idempotency-key=k"],
        ["reverse_payment", "nobody", "x", "5", "--reason=r", "--idempotency-key=k"],
        ["verify_ledger", "nobody"],
    ],
)
def test_an_unknown_organization_is_named(db: None, arguments: list[str]) -> None:
    with pytest.raises(CommandError, match="No organization has the name or slug 'nobody'"):
        run(*arguments)


def test_grant_credits(acme: Organization) -> None:
    grant = ["grant_credits", "Acme", "5", "--reason=gift", "--idempotency-key=k1"]
    told = facts(*grant)
    assert (told["amount"], told["balance"]) == ("5", "15")
    assert facts(*grant) == told
    assert run(*grant) == (
        f"5 USD granted to acme (line {told['ledger_entry']}); its balance is 15 USD."
    )
    with pytest.raises(CommandError, match="was used before"):
        run("grant_credits", "Acme", "6", "--reason=gift", "--idempotency-key=k1")
    with pytest.raises(CommandError, match="above zero"):
        run("grant_credits", "Acme", "0", "--reason=gift", "--idempotency-key=k2")


def test_record_purchase_and_reverse_payment(acme: Organization) -> None:
    paid = ["record_purchase", "acme", "5", "--reason=Invoice 1", "--idempotency-key=invoice-1"]
    told = facts(*paid)
    assert (told["amount"], told["balance"]) == ("5", "15")
    assert facts(*paid) == told
    assert run(*paid).startswith("5 USD purchased by acme (line ")
    back = ["reverse_payment", "acme", "invoice-1", "2", "--reason=r", "--idempotency-key=d1"]
    assert facts(*back)["balance"] == "13"
    assert facts(*back)["amount"] == "-2"
    rest = ["reverse_payment", "acme", "invoice-1", "all", "--reason=r", "--idempotency-key=d2"]
    assert facts(*rest)["balance"] == "10"
    with pytest.raises(CommandError, match="Nothing is left of purchase"):
        run(*rest[:-1], "--idempotency-key=d3")
    with pytest.raises(CommandError, match="no purchase with the reference 'invoice-2'"):
        run("reverse_payment", "acme", "invoice-2", "1", "--reason=r", "--idempotency-key=d4")


def test_adjust_credits(acme: Organization) -> None:
    because = ["--reason=r", "--idempotency-key=a1"]
    assert facts("adjust_credits", "acme", "-2.5", *because)["balance"] == "7.5"
    assert facts("adjust_credits", "acme", "-2.5", *because)["amount"] == "-2.5"
    for amount, message in (("2.5", "was used before"), ("--1", "plain digits"), ("0", "zero")):
        with pytest.raises(CommandError, match=message):
            run("adjust_credits", *because, "--", "acme", amount)


def test_refund_charge(key: ApiKey, worker: GatewayWorker) -> None:
    event = served(key, worker)
    part = ["refund_charge", str(event.pk), "0.0000002", "--reason=r", "--idempotency-key=t1"]
    assert facts(*part)["balance"] == "9.999991"
    assert run(*part).startswith("0.0000002 USD refunded to acme (line ")
    rest = ["refund_charge", str(event.pk), "all", "--reason=r", "--idempotency-key=t2"]
    assert facts(*rest) == facts(*rest)
    assert facts(*rest)["balance"] == "10"
    for generation_id, message in ((str(event.pk), "Nothing is left"), ("x", "No request has")):
        with pytest.raises(CommandError, match=message):
            run("refund_charge", generation_id, "1", "--reason=r", "--idempotency-key=t3")


@pytest.mark.parametrize("scope", [[], ["--full"]])
def test_reconcile(key: ApiKey, worker: GatewayWorker, scope: list[str]) -> None:
    served(key, worker)
    left = admission(key, worker)
    admit(left)
    silence(worker, 121)
    told = facts("reconcile", *scope)
    assert str(left.generation_id) in told["closed_as_lost"]
    assert told["found"] == 0
    counted = {each["name"]: each["counted"] for each in told["invariants"]}
    assert all(counted[name] for name in ("balances", "charges", "costs", "trial_balance"))
    is_full = {each["name"]: each["since"] is None for each in told["invariants"]}
    assert is_full["charges"] == bool(scope)
    assert not is_full["digests"]  # slow: everything only when asked for by name


def test_reconcile_only_what_is_named(acme: Organization) -> None:
    CreditAccount.objects.filter(pk=acme.pk).update(balance=11)
    assert facts("reconcile", "--only=costs", "--only=stuck")["found"] == 0
    assert list(facts("reconcile", "--only=lost")) == ["closed_as_lost", "invariants", "found"]
    [slow] = facts("reconcile", "--full", "--only=digests")["invariants"]
    assert slow["since"] is None
    with pytest.raises(CommandError, match="1 found"):
        run("reconcile", "--json", "--only=balances")
    with pytest.raises(CommandError, match="invalid choice: 'everything'"):
        run("reconcile", "--only=everything")


def test_reconcile_prints_what_it_found_and_fails(acme: Organization) -> None:
    CreditAccount.objects.filter(pk=acme.pk).update(balance=11)
    out = StringIO()
    # The balance, and with it the trial balance.
    with pytest.raises(CommandError, match="2 found; nothing was repaired"):
        call_command("reconcile", stdout=out)
    assert "I1 balance = sum of the ledger\n" in out.getvalue()
    told = "\n  balances: organization acme: balance 11, sum of the ledger 10\n"
    assert told in out.getvalue()
    out = StringIO()
    with pytest.raises(CommandError):
        call_command("reconcile", "--json", stdout=out)
    assert json.loads(out.getvalue())["found"] == 2


@pytest.fixture(scope="module")
def manage(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run manage.py as a shell does, on a database of its own."""
    folder = tmp_path_factory.mktemp("commands")
    environment = {
        **os.environ,
        "DATABASE_URL": f"sqlite:///{folder / 'kiln.sqlite3'}",
        "KILN_VAR_DIR": str(folder),
    }

    def manage(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "manage.py", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    assert manage("migrate", "--verbosity=0").returncode == 0
    return manage


def test_a_shell_sees_one_json_object_and_exit_codes(
    manage: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    made = manage("create_organization", "Acme", "--credits", "1", "--json")
    assert (made.returncode, made.stderr) == (0, "")
    assert json.loads(made.stdout)["balance"] == "1"
    issued = manage("issue_key", "acme", "--json")
    assert json.loads(issued.stdout)["key"].startswith("sk-bk-")
    taken = manage("issue_key", "acme", "--json")
    assert (taken.returncode, taken.stdout) == (1, "")
    assert taken.stderr == "CommandError: acme has a live key named 'default'.\n"
    sound = manage("reconcile", "--full", "--json")
    assert (sound.returncode, json.loads(sound.stdout)["found"]) == (0, 0)


@pytest.mark.parametrize(
    "command",
    [
        *("create_organization", "grant_credits", "reconcile"),
        *("issue_key", "rotate_key", "revoke_key"),
        *("record_purchase", "reverse_payment", "adjust_credits", "refund_charge"),
        "verify_ledger",
    ],
)
def test_help_explains_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        call_command(command, "--help")
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out
