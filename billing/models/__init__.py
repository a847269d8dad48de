"""The tables of billing, and the rules that the database itself keeps.

Who may write them: ApiKey `keys`, UsageEvent `usage`, LedgerEntry and CreditAccount `ledger`,
GatewayWorker `workers`, KeySpend and MinuteUsage `limits`, RefusalCount `refusals`,
ReconciliationRun and Finding `findings`. Money points with PROTECT: nothing that a ledger line
refers to can be deleted.
"""

from billing.models.keys import ApiKey, KeySpend, RefusalCount
from billing.models.ledger import CreditAccount, LedgerDigest, LedgerEntry
from billing.models.organizations import Membership, Organization
from billing.models.reconciliation import Finding, Notice, ReconciliationRun
from billing.models.usage import GatewayWorker, MinuteUsage, UsageEvent

__all__ = [
    "ApiKey",
    "CreditAccount",
    "Finding",
    "GatewayWorker",
    "KeySpend",
    "LedgerDigest",
    "LedgerEntry",
    "Membership",
    "MinuteUsage",
    "Notice",
    "Organization",
    "ReconciliationRun",
    "RefusalCount",
    "UsageEvent",
]
