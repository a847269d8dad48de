"""`manage.py issue_key ORGANIZATION`."""

from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser

from billing import keys, organizations
from billing.management.arguments import add_json, tell
from billing.models import ApiKey


class Command(BaseCommand):
    help = (
        "Issue an API key and print it. It is shown this once: only its digest is stored. "
        "Fails if the organization has a live key of that name."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization", help="Name or slug of the organization.")
        parser.add_argument(
            "--name", default="default", help="What to call the key (default: %(default)s)."
        )
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            name = ApiKey._meta.get_field("name").clean(options["name"], None)
        except ValidationError as refusal:
            raise CommandError(f"--name: {' '.join(refusal.messages)}") from None
        try:
            organization = organizations.find(options["organization"])
            key, secret = keys.issue(organization=organization, name=name)
        except (organizations.OrganizationNotFound, keys.KeyNameTaken) as refusal:
            raise CommandError(str(refusal)) from None
        tell(
            self.stdout,
            options["json"],
            {
                "organization": organization.slug,
                "name": key.name,
                "key": secret,
                "prefix": key.prefix,
                "last4": key.last4,
            },
            f"Key {key.name!r} of {organization}, shown this once: {secret}",
        )
