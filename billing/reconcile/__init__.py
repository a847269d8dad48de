"""The invariants of the money, each a function that counts what it looked at and what it found.

    balances        I1  an account's balance is the sum of its ledger
    charges         I2  an event that cost something has exactly one charge, and only such a one has
                    I3  a charge is minus the cost of its event, in that organization's ledger
    costs           I4  a cost is its tokens times its prices; what was not served costs nothing
    trial_balance       all ledgers by kind add up to all balances
    stuck               no request of a live process is older than a request may get
    anomalies           usage that was odd, shares that are too large, balances that are too low

Reads only: a finding is told, never repaired silently. Each look is safe at any time beside live
traffic, because what it compares it reads in one statement, which is one snapshot.
"""

from billing.reconcile.anomalies import anomalies
from billing.reconcile.money import balances, charges, trial_balance
from billing.reconcile.report import Break, Check, Report
from billing.reconcile.usage import costs, stuck

__all__ = [
    "INVARIANTS",
    "Break",
    "Check",
    "Report",
    "anomalies",
    "balances",
    "charges",
    "costs",
    "stuck",
    "trial_balance",
]

# What is true of sound books, whatever the backends and the operators do.
INVARIANTS = [balances, charges, costs]
