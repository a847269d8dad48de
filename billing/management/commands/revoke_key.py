"""`manage.py revoke_key ORGANIZATION NAME`."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from billing import keys, organizations
from billing.management.arguments import add_json, tell


class Command(BaseCommand):
    help = "End an API key for good. Its next request gets 401, in every process."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization", help="Name or slug of the organization.")
        parser.add_argument("name", help="Name of the key.")
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            organization = organizations.find(options["organization"])
            key = keys.find(organization, options["name"])
        except (organizations.OrganizationNotFound, keys.KeyNotFound) as refusal:
            raise CommandError(str(refusal)) from None
        keys.revoke(key)
        tell(
            self.stdout,
            options["json"],
            {"organization": organization.slug, "name": key.name, "last4": key.last4},
            f"Revoked {key.name!r} of {organization} (…{key.last4}).",
        )
