"""Triggers that refuse to change or delete a line of the ledger or a digest, on both databases.

The ORM offers `update()` and `delete()` to everybody and the admin; what must always hold is held
by the database.
"""

from typing import Any

from django.db import migrations

TABLES = ("billing_ledgerentry", "billing_ledgerdigest")

POSTGRESQL = [
    """
    CREATE FUNCTION billing_ledger_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'the ledger is append-only: % refused', TG_OP
            USING ERRCODE = 'integrity_constraint_violation';
    END $$
    """
]
POSTGRESQL_REVERSE = []
SQLITE = []
SQLITE_REVERSE = []
for table in TABLES:
    POSTGRESQL += [
        f"""
        CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table}
            FOR EACH ROW EXECUTE FUNCTION billing_ledger_is_append_only()
        """,
        f"""
        CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table}
            FOR EACH STATEMENT EXECUTE FUNCTION billing_ledger_is_append_only()
        """,
    ]
    POSTGRESQL_REVERSE += [
        f"DROP TRIGGER {table}_no_truncate ON {table}",
        f"DROP TRIGGER {table}_append_only ON {table}",
    ]
    for operation in ("UPDATE", "DELETE"):
        SQLITE.append(
            f"""
            CREATE TRIGGER {table}_no_{operation} BEFORE {operation} ON {table}
            BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: {operation} refused'); END
            """
        )
        SQLITE_REVERSE.append(f"DROP TRIGGER {table}_no_{operation}")
POSTGRESQL_REVERSE.append("DROP FUNCTION billing_ledger_is_append_only()")


def _run(schema_editor: Any, statements: dict[str, list[str]]) -> None:
    for statement in statements[schema_editor.connection.vendor]:
        schema_editor.execute(statement, params=None)


def forwards(apps: Any, schema_editor: Any) -> None:
    _run(schema_editor, {"postgresql": POSTGRESQL, "sqlite": SQLITE})


def backwards(apps: Any, schema_editor: Any) -> None:
    _run(schema_editor, {"postgresql": POSTGRESQL_REVERSE, "sqlite": SQLITE_REVERSE})


class Migration(migrations.Migration):
    dependencies = [("billing", "0001_initial")]
    operations = [migrations.RunPython(forwards, backwards)]
