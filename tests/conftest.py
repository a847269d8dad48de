"""The tests' world: one database, one demo model server, gateways in processes of their own.

Tests of pages, commands and functions use pytest-django's `db`, which rolls back. Tests through a
real gateway use `acme`, `broke` and `globex`: organizations made anew for each test and committed,
so that nothing has to be flushed and tests may run in any order, beside each other.
"""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from django.core.management import call_command
from django.db import connection, connections

from billing import keys, organizations, reconcile, standing
from billing.models import ApiKey, LedgerEntry, Organization, UsageEvent
from kiln_site.demo.model_server import DemoModelServer
from tests import environment
from tests.gateway_process import SERVERS, GatewayProcess, gateway

CATALOG = Path(__file__).parent / "data" / "catalog.toml"


@pytest.fixture(scope="session")
def django_db_setup(django_db_blocker: Any) -> Iterator[None]:
    """Make the database of this process, and drop it at the end."""
    with django_db_blocker.unblock():
        if environment.KIND == "postgresql":
            _on_postgres_server(f"CREATE DATABASE {environment.NAME}")
        call_command("migrate", verbosity=0)
        connection.close()
    yield
    with django_db_blocker.unblock():
        connections.close_all()
        if environment.KIND == "postgresql":
            cast(Any, connection).close_pool()
            _on_postgres_server(f"DROP DATABASE {environment.NAME} WITH (FORCE)")


def _on_postgres_server(statement: str) -> None:
    import psycopg

    with psycopg.connect(environment.POSTGRES_URL, autocommit=True) as server:
        server.execute(statement.encode())


@pytest.fixture(scope="session")
def model_server() -> Iterator[DemoModelServer]:
    """The backend of all models of tests/data/catalog.toml."""
    with DemoModelServer(models=("qwen3-32b", "gpt-oss-120b"), context_window=32768) as server:
        yield server


@pytest.fixture(scope="session")
def catalog(
    django_db_setup: None,
    django_db_blocker: Any,
    model_server: DemoModelServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Load the tests' catalog once, with its backends on the demo model server."""
    file = tmp_path_factory.mktemp("catalog") / "catalog.toml"
    file.write_text(CATALOG.read_text().replace("http://backend/v1", model_server.url))
    with django_db_blocker.unblock():
        call_command("load_catalog", str(file), "--json", stdout=StringIO())
        connection.close()


@pytest.fixture(scope="session", params=list(SERVERS))
def served(
    request: pytest.FixtureRequest, catalog: None, django_db_blocker: Any
) -> Iterator[GatewayProcess]:
    """A running gateway, once on each ASGI server. At its end the money of all tests must agree."""
    with gateway(request.param) as running:
        yield running
    with django_db_blocker.unblock():
        assert not UsageEvent.objects.filter(state=UsageEvent.State.IN_FLIGHT).exists()
        findings = [finding for check in reconcile.INVARIANTS for finding in check(None).findings]
        connection.close()
    assert findings == []


@pytest.fixture(scope="session")
def uvicorn_served(catalog: None) -> Iterator[GatewayProcess]:
    """A running gateway on uvicorn, for what does not depend on the server or exempts daphne."""
    with gateway("uvicorn") as running:
        yield running


@dataclass
class Tenant:
    """An organization of the tests, with a key, and what its customer and operator can look up."""

    organization: Organization
    key: ApiKey
    secret: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"}

    @property
    def standing(self) -> standing.Standing:
        return standing.standing(self.organization.pk)

    @property
    def balance(self) -> Decimal:
        return self.standing.balance

    def event(self, answer: httpx.Response | str) -> UsageEvent:
        """Return the event of an answer, by the generation ID in its header."""
        identifier = (
            answer if isinstance(answer, str) else answer.headers["X-Neocloud-Generation-Id"]
        )
        return UsageEvent.objects.get(pk=identifier, organization=self.organization)

    def events(self) -> list[UsageEvent]:
        return list(UsageEvent.objects.filter(organization=self.organization).order_by("id"))

    def charges(self) -> list[Decimal]:
        return list(
            LedgerEntry.objects.filter(organization=self.organization, kind="charge")
            .order_by("pk")
            .values_list("amount", flat=True)
        )


@pytest.fixture
def tenant(django_db_setup: None, django_db_blocker: Any) -> Iterator[Callable[..., Tenant]]:
    """Make organizations that are committed: tenant("acme", credits="5", max_in_flight=8)."""

    def make(name: str = "acme", *, credits: str = "5", **fields: Any) -> Tenant:
        slug = f"{name}-{secrets.token_hex(4)}"
        organization, _ = organizations.create(
            name=slug, actor="tests", opening_credits=Decimal(credits), **fields
        )
        key, secret = keys.issue(organization=organization, name="default")
        return Tenant(organization, key, secret)

    with django_db_blocker.unblock():
        yield make
        connection.close()


@pytest.fixture
def acme(tenant: Callable[..., Tenant]) -> Tenant:
    """Has credits."""
    return tenant("acme")


@pytest.fixture
def broke(tenant: Callable[..., Tenant]) -> Tenant:
    """Has none."""
    return tenant("broke", credits="0")


@pytest.fixture
def globex(tenant: Callable[..., Tenant]) -> Tenant:
    """Must see nothing of acme."""
    return tenant("globex")
