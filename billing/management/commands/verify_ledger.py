"""`manage.py verify_ledger [ORGANIZATION]`."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from billing import digests, organizations
from billing.management.arguments import add_json, refusals_told, tell
from billing.models import Organization


class Command(BaseCommand):
    help = (
        "Make every link of the digest chain of one ledger, or of all, again from its lines, and "
        "tell where the first is that does not fit. Exits 1 if there is one. Newest digests are "
        "printed with --json, or for one ledger: kept elsewhere, they show a chain that was remade."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization", nargs="?", help="Name or slug; all without it.")
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        name = options["organization"]
        with refusals_told():
            chosen = [organizations.find(name)] if name else Organization.objects.order_by("slug")
        links = lines = 0
        newest: dict[str, str] = {}
        broken: list[dict[str, str]] = []
        for organization in chosen:
            found = digests.verify(organization)
            links, lines = links + found.links, lines + found.lines
            slug, day = organization.slug, str(found.broken_day)
            if found.broken_day:
                broken.append({"organization": slug, "day": day, "detail": found.detail})
            elif found.newest:
                newest[slug] = found.newest.hex()
        tell(
            self.stdout,
            options["json"],
            {"links": links, "lines": lines, "broken": broken, "newest": newest},
            f"{links} links over {lines} lines verified, {len(broken)} chains broken."
            + "".join(f" Newest: {digest}" for digest in newest.values() if name),
        )
        if broken:
            raise CommandError(
                "; ".join("{organization} on {day}: {detail}".format(**each) for each in broken)
            )
