"""The named world: acme has 10 USD, broke has nothing, globex must not notice."""

import uuid
from decimal import Decimal
from typing import Any

import pytest

from billing import keys, organizations, workers
from billing.models import ApiKey, GatewayWorker, Organization


def _organization(name: str, credits: int) -> Organization:
    organization, _ = organizations.create(
        name=name, actor="tests", opening_credits=Decimal(credits)
    )
    return organization


@pytest.fixture
def acme(db: None) -> Organization:
    return _organization("Acme", 10)


@pytest.fixture
def broke(db: None) -> Organization:
    return _organization("Broke", 0)


@pytest.fixture
def globex(db: None) -> Organization:
    return _organization("Globex", 10)


@pytest.fixture
def key(acme: Organization) -> ApiKey:
    """A key of acme."""
    return keys.issue(organization=acme, name="default")[0]


@pytest.fixture
def worker(db: None) -> GatewayWorker:
    """A gateway process whose heartbeat is fresh."""
    worker_id = uuid.uuid4()
    workers.beat(worker_id=worker_id, host="tests", pid=1)
    return GatewayWorker.objects.get(pk=worker_id)


@pytest.fixture
def operator(django_user_model: Any) -> Any:
    """May do everything in the admin."""
    return django_user_model.objects.create_superuser("operator@kiln.test", "correct horse battery")
