"""`manage.py load_catalog FILE.toml`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from billing.management.arguments import add_json, tell
from gateway import catalog_file
from gateway.toml_table import TableError


class Command(BaseCommand):
    help = (
        "Make the catalog match a TOML file: its models, their prices and their backends "
        "(catalog.example.toml shows the form). All or nothing, and safe to repeat. A changed "
        "price becomes a new version; models that the file does not list stay as they are."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", type=Path, metavar="FILE.toml")
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            loaded = catalog_file.load(catalog_file.read(options["file"]))
        except TableError as error:
            raise CommandError(f"{options['file']}: {error}") from None
        outcome: dict[str, list[str]] = asdict(loaded)
        words = [f"{what}: {', '.join(ids)}" for what, ids in outcome.items() if ids]
        tell(self.stdout, options["json"], outcome, f"{'; '.join(words)}.")
