"""See the package."""

from datetime import UTC, datetime
from sqlite3 import OperationalError
from typing import Any

from django.db.backends.sqlite3 import base

from tests.simulator.faults import FAULTS


def _strftime(format: str, moment: str) -> str:
    """Stand for SQLite's own, which Django calls for the database's time."""
    assert (format, moment) == ("%Y-%m-%d %H:%M:%f", "NOW")
    now = datetime.fromtimestamp(FAULTS.clock(), UTC)
    return now.isoformat(sep=" ", timespec="milliseconds").partition("+")[0]


class Cursor(base.SQLiteCursorWrapper):
    """Each statement may be the one at which the connection breaks."""

    wrapper: "DatabaseWrapper"

    def execute(self, query: Any, params: Any = None) -> Any:
        self.wrapper.pass_through("statement")
        return super().execute(query, params)


class DatabaseWrapper(base.DatabaseWrapper):
    """A connection that breaks when the faults say so, and stays broken until it is closed."""

    is_broken = False

    def get_new_connection(self, conn_params: Any) -> Any:
        if FAULTS.is_database_away:
            raise OperationalError("the database is away")
        self.is_broken = False
        connection = super().get_new_connection(conn_params)
        connection.create_function("strftime", 2, _strftime)
        return connection

    def create_cursor(self, name: Any = None) -> Any:
        cursor = self.connection.cursor(factory=Cursor)
        cursor.wrapper = self
        return cursor

    def pass_through(self, point: str) -> None:
        """Do nothing, or fail as a database does. Raises what SQLite's driver would, or Killed."""
        if FAULTS.is_database_away or FAULTS.happens(f"connection lost at {point}"):
            self.break_off()
        if self.is_broken:
            raise OperationalError("the connection is lost")
        if FAULTS.happens(f"error at {point}"):
            raise OperationalError("the lock was not to be had")
        FAULTS.maybe_kill(point)

    def break_off(self) -> None:
        if not self.is_broken and self.connection is not None:
            self.connection.rollback()  # as the server does when a client is gone
        self.is_broken = True

    def _commit(self) -> Any:
        with self.wrap_database_errors:
            self.pass_through("commit")
            super()._commit()  # type: ignore[misc]  # the stubs leave it out
            self.pass_through("the answer to a commit")

    def _rollback(self) -> Any:
        with self.wrap_database_errors:
            if self.is_broken:
                raise OperationalError("the connection is lost")
        return super()._rollback()  # type: ignore[misc]

    def is_usable(self) -> bool:
        return not self.is_broken
