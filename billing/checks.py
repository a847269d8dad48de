"""The checks of billing by name: for the beat, and for `manage.py reconcile`."""

from billing import digests
from billing.reconcile import (
    Check,
    anomalies,
    balances,
    charges,
    costs,
    stuck,
    trial_balance,
)

CHECKS = {
    check.name: check
    for check in (
        Check("balances", balances),
        Check("charges", charges),
        Check("costs", costs),
        Check("trial_balance", trial_balance),
        Check("digests", digests.verify_all, hours=48, is_slow=True),  # reads each line
        Check("stuck", stuck),
        # A share of a quiet hour says little.
        Check("anomalies", anomalies, hours=24),
    )
}
