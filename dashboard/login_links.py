"""One-time login links: made by a command on the server, spent by the first visit.

A link is signed and stored nowhere. Its signature covers the user's password and last login, so
any login ends it, its own included. It is for a terminal, never for mail, where a scanner that
follows links would spend it.
"""

from datetime import timedelta
from urllib.parse import urlencode

from django.contrib.auth.tokens import PasswordResetTokenGenerator
from django.urls import reverse
from django.utils import timezone
from django.utils.http import base36_to_int

from dashboard.models import User

VALID_FOR = timedelta(hours=24)


class _TokenGenerator(PasswordResetTokenGenerator):
    key_salt = "dashboard.login_links"

    def check_token(self, user: User | None, token: str | None) -> bool:
        if token is None or not super().check_token(user, token):
            return False
        made = base36_to_int(token.partition("-")[0])
        return self._num_seconds(self._now()) - made <= VALID_FOR.total_seconds()

    def _make_hash_value(self, user: User, timestamp: int) -> str:
        # Django's own cuts the last login to whole seconds: a link that is made and spent within
        # the second of a login would work again.
        return f"{user.pk} {user.password} {user.last_login!r} {timestamp}"


_tokens = _TokenGenerator()


def make(user: User, *, next: str = "") -> str:
    """Return the path of a link that logs `user` in once and leads on to the path `next`."""
    path = reverse("login-link", args=[user.pk, _tokens.make_token(user)])
    return f"{path}?{urlencode({'next': next})}" if next else path


def spend(user_id: int, token: str) -> User | None:
    """Return the user whom the link logs in, and end the link; None for a link that is no good."""
    user = User.objects.filter(pk=user_id, is_active=True).first()
    if user is None or not _tokens.check_token(user, token):
        return None
    # Of two visits at once, only the one that moves the last login gets in.
    seen = User.objects.filter(pk=user.pk, last_login=user.last_login)
    return user if seen.update(last_login=timezone.now()) else None
