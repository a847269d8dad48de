"""The named world: acme has credits, broke has none, globex must see nothing of acme."""

from decimal import Decimal

import pytest

from billing.models import ApiKey, Organization
from dashboard.models import User
from tests.dashboard import world


@pytest.fixture
def acme(db: None) -> Organization:
    return world.organization("Acme", credits=Decimal(25))


@pytest.fixture
def broke(db: None) -> Organization:
    return world.organization("Broke")


@pytest.fixture
def globex(db: None) -> Organization:
    return world.organization("Globex", credits=Decimal(5))


@pytest.fixture
def ada(acme: Organization) -> User:
    """A member of acme."""
    return world.person("ada@acme.test", acme)


@pytest.fixture
def password(ada: User) -> str:
    """Return the password of ada, who has none without it."""
    ada.set_password(world.PASSWORD)
    ada.save()
    return world.PASSWORD


@pytest.fixture
def gus(globex: Organization) -> User:
    """A member of globex."""
    return world.person("gus@globex.test", globex)


@pytest.fixture
def operator(db: None) -> User:
    """Runs the gateway, and is a member of no organization."""
    return world.person("operator@kiln.test", is_staff=True, is_superuser=True)


@pytest.fixture
def acme_key(acme: Organization) -> tuple[ApiKey, str]:
    return world.key(acme)


@pytest.fixture
def globex_key(globex: Organization) -> tuple[ApiKey, str]:
    return world.key(globex)
