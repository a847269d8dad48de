"""`manage.py rotate_key ORGANIZATION NAME`."""

from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from billing import keys, organizations
from billing.management.arguments import add_json, tell


class Command(BaseCommand):
    help = (
        "Replace an API key by a new one of the same name and limits, and print that, this once. "
        "The old key is renamed and works for some hours more, so that nothing stops meanwhile."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization", help="Name or slug of the organization.")
        parser.add_argument("name", help="Name of the key.")
        parser.add_argument(
            "--overlap-hours",
            type=int,
            default=keys.OVERLAP_HOURS,
            metavar="N",
            help="How long the old key still works (default: %(default)s); 0 ends it at once.",
        )
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        hours = options["overlap_hours"]
        if not 0 <= hours <= keys.OVERLAP_HOURS_MAX:
            raise CommandError(f"--overlap-hours is from 0 to {keys.OVERLAP_HOURS_MAX}.")
        try:
            organization = organizations.find(options["organization"])
            old = keys.find(organization, options["name"])
            key, secret = keys.rotate(old, timedelta(hours=hours))
        except (
            organizations.OrganizationNotFound,
            keys.KeyNotFound,
            keys.KeyEnded,
            keys.KeyNameTaken,
        ) as refusal:
            raise CommandError(str(refusal)) from None
        old.refresh_from_db()
        ends_at = f"{old.expires_at:%Y-%m-%dT%H:%M:%SZ}"
        tell(
            self.stdout,
            options["json"],
            {
                "organization": organization.slug,
                "name": key.name,
                "key": secret,
                "prefix": key.prefix,
                "last4": key.last4,
                "old_name": old.name,
                "old_last4": old.last4,
                "old_expires_at": ends_at,
            },
            f"Key {key.name!r} of {organization}, shown this once: {secret} "
            f"(the old one, …{old.last4}, works until {ends_at})",
        )
