"""`manage.py demo`: everything on this machine, in one process, in one command."""

import asyncio
import sys
import threading
from argparse import ArgumentParser
from contextlib import ExitStack
from decimal import Decimal
from typing import Any

from django.core.management import BaseCommand, CommandError, call_command

from billing.pricing import Prices
from dashboard import login_links
from gateway.catalog_file import ModelEntry
from kiln_site.demo import house, llama, seed, self_check
from kiln_site.demo.model_server import DemoModelServer

_TOKENS_PER_SECOND = 40.0
# The real models' prices are made up: nobody sells a 135M model.
_REAL_PRICES = Prices(Decimal("0.01"), Decimal("0.005"), Decimal("0.02"))
_REAL_CONTEXT = 2048


class Command(BaseCommand):
    help = (
        "Run Kiln on this machine to look around: the gateway with its pages, Celery's worker and "
        "beat, and a model server, in one process on 127.0.0.1, with SQLite under var/demo. "
        "Prints login links, an API key and a curl command. Ctrl-C ends it; the data stays."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--port", type=int, help="listen here; without it 8000, or the next port that is free"
        )
        parser.add_argument("--reset", action="store_true", help="begin with an empty var/demo")
        parser.add_argument("--empty", action="store_true", help="make no history of requests")
        parser.add_argument(
            "--check",
            action="store_true",
            help="send a plain and a streamed request, compare answers, events and ledger, "
            "print PASS and end",
        )
        parser.add_argument(
            "--model",
            default="",
            metavar="NAME",
            help="smollm2: a real language model (llama.cpp; needs requirements-realserver.txt) "
            "instead of the demo model server",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        port = house.free_port(options["port"] or 8000)
        if options["port"] and port != options["port"]:
            raise CommandError(f"port {options['port']} is taken")
        call_command("migrate", verbosity=0)
        with ExitStack() as stack:
            models = self._start_models(options["model"], stack)
            seeded = seed.seed(models, with_history=not options["empty"])
            stack.enter_context(house.celery())
            if options["check"]:
                self._check(port, seeded, models[0].id)
            else:
                house.Server(port, lambda: self._greet(port, seeded, models[0].id)).run()

    def _start_models(self, name: str, stack: ExitStack) -> list[ModelEntry]:
        """Start the model server and return the models that it serves."""
        if not name:
            server = stack.enter_context(DemoModelServer(pace=_TOKENS_PER_SECOND))
            return seed.served_by(seed.PAGE_MODELS, server.url)
        try:
            real = stack.enter_context(llama.start(name, alias=name, context=_REAL_CONTEXT))
        except llama.LlamaFailed as error:
            raise CommandError(str(error)) from None
        model = ModelEntry(id=name, context_window=_REAL_CONTEXT, prices=_REAL_PRICES)
        return seed.served_by([model], real.url)

    def _greet(self, port: int, seeded: seed.Seeded, model: str) -> None:
        # Links say localhost and not 127.0.0.1: passkeys are bound to a name.
        site = f"http://localhost:{port}"
        customer = login_links.make(seeded.customer)
        operator = login_links.make(seeded.operator, next="/admin/")
        self.stdout.write(
            f"""
Kiln is running on {site} (Ctrl-C ends it)

  Customer's dashboard   {site}{customer}
  Operator's admin       {site}{operator}
  (each link logs in once; restart the demo for new ones)

  API key                {seeded.secret}
  (shown once; the next start issues another)

Try it; the request appears on the dashboard's first page:

  curl {site}/v1/chat/completions \\
    -H "Authorization: Bearer {seeded.secret}" \\
    -H "Content-Type: application/json" \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
"""
        )
        self.stdout.flush()

    def _check(self, port: int, seeded: seed.Seeded, model: str) -> None:
        ready = threading.Event()
        server = house.Server(port, ready.set)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
        thread.start()
        try:
            if not ready.wait(30):
                raise CommandError("the gateway did not start")
            for line in self_check.run(f"http://127.0.0.1:{port}/v1", seeded.secret, model):
                self.stdout.write(line)
        except self_check.CheckFailed as failure:
            sys.stderr.write(f"FAIL: {failure}\n")
            raise SystemExit(1) from None
        finally:
            server.should_exit = True
            thread.join(15)
        self.stdout.write("PASS")
