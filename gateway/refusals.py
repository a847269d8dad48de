"""Billing's refusals in the words of the API, in one table for the endpoint and the usage API."""

from billing import keys, standing
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
        case standing.InsufficientCredits(standing=now):
            return errors.InsufficientCredits(balance=now.balance, held=now.held)
        case standing.TooManyInFlight(standing=now):
            return errors.TooManyInFlight(
                f"The organization already has {now.max_in_flight} requests in flight."
            )
    return errors.InvalidApiKey()
