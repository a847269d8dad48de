"""Counter rows: a number is added to each in one statement, and a row is made where there is none.

Django's upsert can only overwrite, which would need a read before each write.
"""

from collections.abc import Sequence
from typing import Any

from django.db import connection
from django.db.models import Model


def add(rows: Sequence[Model], *, to: Sequence[str], of: Sequence[str]) -> None:
    """Add the fields `to` of these rows to the stored ones that have the same fields `of`.

    `rows` are of one model, whose unique constraint is `of`, and no two of them are of the same.
    They are written in the order of `of`, so two processes that add to the same rows cannot wait
    for each other.
    """
    if not rows:
        return
    quoted = connection.ops.quote_name
    table = rows[0]._meta
    name = quoted(table.db_table)
    fields: list[Any] = [table.get_field(each) for each in (*of, *to)]
    columns = [quoted(field.column) for field in fields]
    sums = [f"{column} = {name}.{column} + EXCLUDED.{column}" for column in columns[len(of) :]]
    row_of_places = f"({', '.join(['%s'] * len(fields))})"
    values = sorted([getattr(row, field.attname) for field in fields] for row in rows)
    with connection.cursor() as cursor:
        cursor.execute(
            # Names of tables and columns only; every value is a parameter.
            f"INSERT INTO {name} ({', '.join(columns)}) "  # noqa: S608
            f"VALUES {', '.join([row_of_places] * len(rows))} "
            f"ON CONFLICT ({', '.join(columns[: len(of)])}) DO UPDATE SET {', '.join(sums)}",
            [
                field.get_db_prep_save(value, connection)
                for row in values
                for field, value in zip(fields, row, strict=True)
            ],
        )
