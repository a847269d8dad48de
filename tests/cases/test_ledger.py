"""Section G: ledger, jobs, dashboard, admin."""

from collections.abc import Callable
from pathlib import Path

from django.db import connection

from tests import environment
from tests.conftest import Tenant
from tests.gateway_process import GatewayProcess
from tests.test_completions import body
from tests.test_document import Api


def test_c75_streams_hold_no_database_connections(api: Api, tenant: Callable[..., Tenant]) -> None:
    many = api.of(tenant("many", max_in_flight=100))
    with many.in_flight(10):
        few = _connections(api.gateway)
    with many.in_flight(80):
        # Writer, heartbeat, catalog and the pages' threads have one each; 80 streams have none.
        assert _connections(api.gateway) <= few + 20
        assert many.get("credits").status_code == 200
        assert api.post(body()).status_code == 200


def _connections(running: GatewayProcess) -> int:
    """Return how many connections to the database are open from the gateway's process."""
    if environment.KIND == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            )
            [number] = cursor.fetchone()
            return int(number)
    found = 0
    for file in Path(f"/proc/{running.process.pid}/fd").iterdir():
        try:
            found += str(file.readlink()).endswith(".sqlite3")
        except FileNotFoundError:
            continue
    return found
