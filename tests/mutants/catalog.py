"""The mutants: what each changes in which module, and the tests that must fail with it.

A text that is no longer in its module makes tests/test_mutants.py fail: say then what the bug would
be now.
"""

from dataclasses import dataclass

_USAGE = "tests/billing/test_usage.py::"
_RACES = "tests/billing/test_races.py::"
_LEDGER = "tests/billing/test_ledger.py::"
_SPOOL = "tests/gateway/test_spool.py::"
_SIMULATOR = "tests/test_simulator.py::test_no_seed_breaks_the_books[1]"


@dataclass(frozen=True)
class Change:
    """A text that stands once in a module, and what stands there in its place."""

    module: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        if source.count(self.old) != 1:
            raise LookupError(f"not once in {self.module}: {self.old}")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Mutant:
    """A bug, and the database on which it is caught: the one lock of SQLite hides some."""

    changes: tuple[Change, ...]
    catchers: tuple[str, ...]
    database: str = "sqlite"


MUTANTS = {
    "answers before the commit": Mutant(
        (
            Change(
                "gateway.writer",
                "                _note(results, admissions, usage.admit(admissions, accounts))\n",
                "                _note(results, admissions, usage.admit(admissions, accounts))\n"
                "            self._answer(group, [results.get(id(one.what)) for one in group])\n",
            ),
        ),
        (_SIMULATOR,),
    ),
    "forgets the settlements of a group that fails": Mutant(
        (
            Change(
                "gateway.writer",
                "        self._waiting += [operation for operation in settlements"
                " if operation.since >= wait_from]\n",
                "",
            ),
        ),
        (_SIMULATOR,),
    ),
    "settles inside the cancelled task": Mutant(
        (
            Change(
                "gateway.commits",
                '    def settle(self, settlement: usage.Settlement) -> "asyncio.Future[Decimal]":',
                "    async def settle(self, settlement: usage.Settlement) -> Decimal:",
            ),
            Change(
                "gateway.commits",
                "        return self._submit(settlement)\n",
                "        await asyncio.sleep(0)\n        return await self._submit(settlement)\n",
            ),
        ),
        (_SIMULATOR,),
    ),
    "does not lock the account": Mutant(
        (
            Change(
                "billing.ledger",
                "CreditAccount.objects.select_for_update()",
                "CreditAccount.objects.all()",
            ),
        ),
        (
            f"{_RACES}test_who_comes_meanwhile_sees_what_was_admitted",
            f"{_RACES}test_who_comes_meanwhile_sees_what_was_charged",
        ),
        database="postgresql",
    ),
    "counts in the statement that locks": Mutant(
        (
            Change(
                "billing.ledger",
                "\nKind = LedgerEntry.Kind\n",
                "\nKind = LedgerEntry.Kind\n"
                "from django.db.models import Count, OuterRef, Subquery\n"
                "from billing.workers import is_live\n"
                "_RUNNING = UsageEvent.objects.filter(\n"
                "    is_live(), organization=OuterRef('pk'), state='in_flight'\n"
                ").order_by().values('organization').annotate(number=Count('pk'))\n",
            ),
            Change(
                "billing.ledger",
                "CreditAccount.objects.select_for_update()",
                "CreditAccount.objects.select_for_update()"
                ".annotate(running=Subquery(_RUNNING.values('number')))",
            ),
            Change(
                "billing.standing",
                "        one.in_flight += number\n",
                "        one.in_flight = accounts[organization_id].running or 0\n",
            ),
        ),
        (f"{_RACES}test_who_comes_meanwhile_sees_what_was_admitted",),
        database="postgresql",
    ),
    "counts the limit per process": Mutant(
        (
            Change(
                "billing.usage",
                "            organization.refuse_one_more(key.pk)\n",
                "            organization.in_flight = len(opened) + UsageEvent.objects.filter(\n"
                "                organization=admission.organization_id, state=State.IN_FLIGHT,\n"
                "                worker=admission.worker_id,\n"
                "            ).count()\n"
                "            organization.refuse_one_more(key.pk)\n",
            ),
        ),
        (f"{_RACES}test_the_limit_is_one_over_all_processes",),
    ),
    "settles whatever the state": Mutant(
        (
            Change(
                "billing.usage",
                "    return state in {State.IN_FLIGHT, None}\n",
                "    return True\n",
            ),
        ),
        (f"{_USAGE}test_settling_twice_changes_nothing",),
    ),
    "lets an event be charged twice": Mutant(
        (
            Change(
                "billing.migrations.0001_initial",
                'fields=("event",),\n                name="ledger_entry_one_charge_per_event"',
                'fields=("event", "id"),\n                name="ledger_entry_one_charge_per_event"',
            ),
        ),
        (f"{_LEDGER}test_an_event_is_charged_once",),
    ),
    "refunds more than the charge": Mutant(
        (Change("billing.ledger", "    if abs(amount) > abs(left):\n", "    if not amount:\n"),),
        (f"{_LEDGER}test_a_charge_is_refunded_in_parts_and_never_more",),
    ),
    "reckons in floats": Mutant(
        (
            Change(
                "billing.pricing",
                "    return Decimal(picodollars).scaleb(-12)\n",
                "    return Decimal(picodollars / 1e12)\n",
            ),
        ),
        ("tests/billing/test_pricing.py::test_a_cost_is_a_whole_number_of_picodollars",),
    ),
    "bills what failed": Mutant(
        (
            Change(
                "billing.usage",
                "        if self.state not in {State.SUCCEEDED, State.CANCELLED}:\n",
                "        if self.state == State.LOST:\n",
            ),
        ),
        (f"{_USAGE}test_a_request_that_failed_costs_nothing[failed]",),
    ),
    "estimates where zero was reported": Mutant(
        (
            Change(
                "gateway.meter",
                "        if reported is None:\n            output",
                "        if reported is None or not reported['completion_tokens']:\n"
                "            output",
            ),
        ),
        ("tests/gateway/test_meter.py::test_a_first_zero_is_respected",),
    ),
    "holds what has ended": Mutant(
        (
            Change(
                "billing.standing",
                "            is_live(), organization__in=found, state=UsageEvent.State.IN_FLIGHT\n",
                "            is_live(), organization__in=found\n",
            ),
        ),
        (
            f"{_USAGE}test_the_last_picodollar_can_be_spent",
            f"{_USAGE}test_eight_are_admitted_and_not_nine",
        ),
    ),
    "keeps alive with every heartbeat whoever is dead": Mutant(
        (
            Change(
                "billing.workers",
                "    if not GatewayWorker.objects.filter(pk=worker_id).update(heartbeat_at=Now(),"
                " stopped_at=None):\n",
                "    if not GatewayWorker.objects.update(heartbeat_at=Now())"
                " or not GatewayWorker.objects.filter(pk=worker_id):\n",
            ),
        ),
        (f"{_USAGE}test_slots_and_holds_of_a_silent_worker_do_not_count", _SIMULATOR),
    ),
    "counts the slots of the dead": Mutant(
        (
            Change(
                "billing.workers",
                "    return Q(worker__heartbeat_at__gt=Now() - ttl)\n",
                "    return Q()\n",
            ),
        ),
        (f"{_USAGE}test_slots_and_holds_of_a_silent_worker_do_not_count",),
    ),
    "names a cost before the spool is synced": Mutant(
        (
            Change(
                "gateway.spool",
                "            os.fsync(file)\n        except OSError:\n            os.ftruncate",
                "        except OSError:\n            os.ftruncate",
            ),
        ),
        (f"{_SPOOL}test_nothing_is_taken_when_the_disk_takes_not_all", _SIMULATOR),
    ),
    "empties the spool before the commit": Mutant(
        (
            Change(
                "gateway.spool",
                "        settled = _settle_all(self._path, settle)\n",
                "        settled = _read(self._path)\n"
                "        os.ftruncate(self._open(), 0)\n"
                "        settle(settled)\n",
            ),
        ),
        (f"{_SPOOL}test_a_file_stays_until_it_was_settled", _SIMULATOR),
    ),
    "takes the spool of a process that lives": Mutant(
        (
            Change(
                "gateway.spool",
                "            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
                "            pass\n",
            ),
        ),
        (f"{_SPOOL}test_another_process_leaves_the_file_of_a_live_one_alone",),
    ),
}
