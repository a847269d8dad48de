"""Acme's view of a gateway, as tests/test_settlement.py has it."""

import pytest

from kiln_site.demo.model_server import DemoModelServer
from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess
from tests.test_document import Api, seen_by


@pytest.fixture
def api(served: GatewayProcess, acme: Tenant, model_server: DemoModelServer) -> Api:
    """On either server."""
    return seen_by(acme, served, model_server)


@pytest.fixture
def on_uvicorn(uvicorn_served: GatewayProcess, acme: Tenant, model_server: DemoModelServer) -> Api:
    """On uvicorn, for what is the same on both or exempts daphne."""
    return seen_by(acme, uvicorn_served, model_server)
