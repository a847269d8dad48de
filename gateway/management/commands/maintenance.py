"""`manage.py maintenance on --until ISO8601` and `manage.py maintenance off`."""

from datetime import UTC, datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from billing.management.arguments import add_json, tell
from gateway import maintenance


class Command(BaseCommand):
    help = (
        "Switch maintenance on or off, for all models or for one. While it is on, new requests "
        "get 503 with the end as Retry-After; running ones finish. It takes effect in every "
        "process within two seconds, and ends by itself at its end."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("switch", choices=["on", "off"])
        parser.add_argument(
            "--until",
            metavar="ISO8601",
            help="When it ends, as in 2030-01-31T18:00:00Z; UTC where no zone is given. "
            "Needed with `on`.",
        )
        parser.add_argument(
            "--model", metavar="ID", help="Only this model (default: all of the service)."
        )
        parser.add_argument("--message", default="", help="Shown to clients with the 503.")
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        model_id = options["model"]
        what = f"model {model_id}" if model_id else "all models"
        facts: dict[str, object] = {"maintenance": options["switch"], "model": model_id}
        try:
            if options["switch"] == "on":
                until = _moment(options["until"])
                maintenance.switch_on(until=until, model_id=model_id, message=options["message"])
                facts |= {"until": until.isoformat(), "message": options["message"]}
                sentence = f"Maintenance of {what} is on until {until:%Y-%m-%d %H:%M:%S} UTC."
            elif options["until"] or options["message"]:
                raise CommandError("`maintenance off` takes no --until and no --message.")
            else:
                was_on = maintenance.switch_off(model_id=model_id)
                facts["was_on"] = was_on
                sentence = f"Maintenance of {what} is off{'' if was_on else ', as it was before'}."
        except maintenance.MaintenanceRefused as refusal:
            raise CommandError(str(refusal)) from None
        tell(self.stdout, options["json"], facts, sentence)


def _moment(text: str | None) -> datetime:
    """Return the moment that `text` names, in UTC. Raises CommandError."""
    if text is None:
        raise CommandError("`maintenance on` needs --until, as in 2030-01-31T18:00:00Z.")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(f"{text!r} is no ISO 8601 time, as in 2030-01-31T18:00:00Z.") from None
    # The service speaks UTC everywhere, so a time without a zone is UTC too.
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
