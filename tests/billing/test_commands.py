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


@pytest.mark.parametrize("scope", [[], ["--full"]])
def test_reconcile(key: ApiKey, worker: GatewayWorker, scope: list[str]) -> None:
    served(key, worker)
    left = admission(key, worker)
    admit(left)
    silence(worker, 121)
    told = facts("reconcile", *scope)
    assert str(left.generation_id) in told["closed_as_lost"]
    assert told["found"] == 0
    assert [each["counted"] > 0 for each in told["invariants"]] == [True] * 3


def test_reconcile_prints_what_it_found_and_fails(acme: Organization) -> None:
    CreditAccount.objects.filter(pk=acme.pk).update(balance=11)
    out = StringIO()
    with pytest.raises(CommandError, match="1 found; nothing was repaired"):
        call_command("reconcile", stdout=out)
    assert "I1 balance = sum of the ledger: " in out.getvalue()
    assert "\n  organization acme: balance 11, sum of the ledger 10\n" in out.getvalue()
    out = StringIO()
    with pytest.raises(CommandError):
        call_command("reconcile", "--json", stdout=out)
    assert json.loads(out.getvalue())["found"] == 1


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
    "command", ["create_organization", "issue_key", "grant_credits", "reconcile"]
)
def test_help_explains_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        call_command(command, "--help")
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out
