"""The operators' admin of billing: what an operator sees and does, and who did it.

Money moves only through `billing.ledger`, keys and organizations change only through their own
modules; no form here edits an amount that moved, and no page shows a key after its first.
"""

from billing.admin import keys, organizations, reconciliation, records

__all__ = ["keys", "organizations", "reconciliation", "records"]
