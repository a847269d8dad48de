"""Billing's refusals in the words of the API, in one table for the endpoint and the usage API."""

from datetime import UTC, datetime
from math import ceil

from billing import keys, standing
from billing.limits import Minute
from gateway import errors


def in_words_of_api(refusal: Exception) -> errors.ApiError:
    """Say a refusal of billing in the words of the API; an ApiError is said as it is."""
    match refusal:
        case errors.ApiError():
            return refusal
        case keys.KeyPaused():
            return errors.KeyPaused()
        case keys.OrganizationSuspended():
            return errors.OrganizationSuspended(str(refusal))
        case keys.ModelNotAllowed():
            return errors.ModelNotAllowed(str(refusal))
        case standing.InsufficientCredits(standing=now):
            return errors.InsufficientCredits(balance=now.balance, held=now.held)
        case standing.SpendLimitReached(spending=spending):
            return errors.SpendLimitReached(
                limit=spending.limit,
                period=spending.period,
                spent=spending.spent,
                held=spending.held,
                resets_at=spending.resets_at,
            )
        case standing.TooManyInFlight(standing=now):
            return errors.TooManyInFlight(
                f"The organization already has {now.max_in_flight} requests in flight."
            )
        case standing.RateLimitReached(minute=minute, which=which):
            return _rate_limit_reached(minute, which)
    return errors.InvalidApiKey()


def rate_limit_headers(minute: Minute) -> list[tuple[str, str]]:
    """Return what is left of the organization's limits per minute, of those that it has."""
    seconds = str(_seconds_until(minute.resets_at))
    limits = [
        ("requests", minute.requests_limit, minute.requests),
        ("tokens", minute.tokens_limit, minute.tokens),
    ]
    return [
        header
        for name, limit, used in limits
        if limit is not None
        for header in (
            (f"x-ratelimit-limit-{name}", str(limit)),
            (f"x-ratelimit-remaining-{name}", str(max(limit - used, 0))),
            (f"x-ratelimit-reset-{name}", seconds),
        )
    ]


def _rate_limit_reached(minute: Minute, which: str) -> errors.RateLimitReached:
    number, what = minute.requests_limit, "requests"
    if which == "tokens_per_minute":
        number, what = minute.tokens_limit, "tokens, settled and held,"
    # Never 0: the minute may have ended since, and "at once" must not be a loop.
    seconds = max(_seconds_until(minute.resets_at), 1)
    return errors.RateLimitReached(
        f"The organization's limit of {number} {what} per minute is reached. "
        f"It resets in {seconds} s.",
        param=which,
        retry_after=seconds,
        headers=rate_limit_headers(minute),
    )


def _seconds_until(moment: datetime) -> int:
    # Within a minute, whatever the difference between the database's clock and this one.
    return min(max(ceil((moment - datetime.now(UTC)).total_seconds()), 0), 60)
