"""Triggers that refuse to change or delete a line of the ledger, on both databases.

The ORM offers `update()` and `delete()` to everybody and the admin; what must always hold is held
by the database.
"""

from typing import Any

from django.db import migrations

POSTGRESQL = [
    """
    CREATE FUNCTION billing_ledger_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'the ledger is append-only: % refused', TG_OP
            USING ERRCODE = 'integrity_constraint_violation';
    END $$
    """,
    """
    CREATE TRIGGER billing_ledgerentry_append_only BEFORE UPDATE OR DELETE ON billing_ledgerentry
        FOR EACH ROW EXECUTE FUNCTION billing_ledger_is_append_only()
    """,
    """
    CREATE TRIGGER billing_ledgerentry_no_truncate BEFORE TRUNCATE ON billing_ledgerentry
        FOR EACH STATEMENT EXECUTE FUNCTION billing_ledger_is_append_only()
    """,
]
POSTGRESQL_REVERSE = [
    "DROP TRIGGER billing_ledgerentry_no_truncate ON billing_ledgerentry",
    "DROP TRIGGER billing_ledgerentry_append_only ON billing_ledgerentry",
    "DROP FUNCTION billing_ledger_is_append_only()",
]
SQLITE = [
    f"""
    CREATE TRIGGER billing_ledgerentry_no_{operation} BEFORE {operation} ON billing_ledgerentry
    BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: {operation} refused'); END
    """
    for operation in ("UPDATE", "DELETE")
]
SQLITE_REVERSE = [
    f"DROP TRIGGER billing_ledgerentry_no_{operation}" for operation in ("UPDATE", "DELETE")
]


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
