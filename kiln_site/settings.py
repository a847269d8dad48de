"""All settings, and the only place that reads the environment.

Safe by default: without `DEBUG=True` the process is in production, and refuses to start unless
DATABASE_URL, SECRET_KEY and ALLOWED_HOSTS say where its data is, what it signs with and who it is.
docs/settings.md lists every variable; a test compares that table with this file.
"""

import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import environ
from celery.schedules import crontab
from django.core.exceptions import ImproperlyConfigured

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.FileAwareEnv()  # NAME_FILE names a file that holds NAME's value, for secrets


def _version() -> str:
    """Return the newest release in CHANGELOG.md, where the version lives."""
    found = re.search(r"^## \[?(\d+\.\d+\.\d+)", (BASE_DIR / "CHANGELOG.md").read_text(), re.M)
    return found[1] if found else "0.0.0"


def _required(name: str, development: str) -> str:
    """Return a variable that production must set; `development` stands in where DEBUG is on."""
    value: str = env.str(name, default=development if DEBUG else "")
    if not value:
        raise ImproperlyConfigured(
            f"{name} is not set. Production needs DATABASE_URL, SECRET_KEY and ALLOWED_HOSTS "
            "(docs/settings.md); for development set DEBUG=True; to look around run `make demo`."
        )
    return value


VERSION = _version()

# --- Process -------------------------------------------------------------------------------------
DEBUG = env.bool("DEBUG", default=False)
SECRET_KEY = _required("SECRET_KEY", "development-only-" + "0" * 50)
ALLOWED_HOSTS = _required("ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]").split(",")
KILN_VAR_DIR = Path(env.str("KILN_VAR_DIR", default=str(BASE_DIR / "var"))).resolve()

# --- Limits and times of the gateway (units are in the names) ------------------------------------
KILN_BODY_MAX_MIB = env.int("KILN_BODY_MAX_MIB", default=20)
KILN_JSON_DEPTH_MAX = env.int("KILN_JSON_DEPTH_MAX", default=64)
KILN_CONNECT_SECONDS = env.float("KILN_CONNECT_SECONDS", default=5.0)
KILN_FIRST_BYTE_SECONDS = env.float("KILN_FIRST_BYTE_SECONDS", default=600.0)
KILN_IDLE_SECONDS = env.float("KILN_IDLE_SECONDS", default=120.0)
KILN_TOTAL_SECONDS = env.float("KILN_TOTAL_SECONDS", default=1800.0)
KILN_KEEPALIVE_SECONDS = env.float("KILN_KEEPALIVE_SECONDS", default=15.0)
KILN_STALLED_READER_SECONDS = env.float("KILN_STALLED_READER_SECONDS", default=60.0)
KILN_UPLOAD_SECONDS = env.float("KILN_UPLOAD_SECONDS", default=30.0)
KILN_FRAME_MAX_MIB = env.int("KILN_FRAME_MAX_MIB", default=32)
KILN_UNDELIVERED_MAX_KIB = env.int("KILN_UNDELIVERED_MAX_KIB", default=1024)
KILN_MAX_IN_FLIGHT = env.int("KILN_MAX_IN_FLIGHT", default=8)
KILN_HOLD_OUTPUT_TOKENS_MAX = env.int("KILN_HOLD_OUTPUT_TOKENS_MAX", default=16384)
KILN_HEARTBEAT_SECONDS = env.float("KILN_HEARTBEAT_SECONDS", default=2.0)
KILN_HEARTBEAT_TTL_SECONDS = env.float("KILN_HEARTBEAT_TTL_SECONDS", default=10.0)
KILN_DRAIN_SECONDS = env.float("KILN_DRAIN_SECONDS", default=30.0)
KILN_KEY_PREFIX = env.str("KILN_KEY_PREFIX", default="sk-bk-")

# --- Notices to customers ------------------------------------------------------------------------
vars().update(env.email_url("EMAIL_URL", default="consolemail://"))
EMAIL_TIMEOUT = 10
DEFAULT_FROM_EMAIL = env.str("EMAIL_FROM", default="Kiln <kiln@localhost>")
KILN_WEBHOOK_PRIVATE = env.bool("KILN_WEBHOOK_PRIVATE", default=DEBUG)

# --- Rooms ---------------------------------------------------------------------------------------
INSTALLED_APPS = [
    "daphne",  # first: it takes over `runserver`
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "kiln_site.demo",
    "dashboard",
    "gateway",
    "billing",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "dashboard.csp.ContentSecurityPolicyMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "kiln_site.urls"
ASGI_APPLICATION = "kiln_site.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

# --- Data ----------------------------------------------------------------------------------------
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"


def _database() -> dict[str, Any]:
    """Return Django's settings of DATABASE_URL, with what each of the two databases needs."""
    url = _required("DATABASE_URL", f"sqlite:///{KILN_VAR_DIR / 'kiln.sqlite3'}")
    database: dict[str, Any] = env.db_url_config(url)
    if database["ENGINE"] == "django.db.backends.sqlite3":
        Path(database["NAME"]).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        database["OPTIONS"] = {
            # A transaction that reads first and writes later would fail at once with "locked";
            # one that takes the write lock at BEGIN waits its turn.
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;",
        }
    else:
        # Gives up soon on a database that is away, and finds it soon when it is back: settlements
        # wait two seconds before they are spooled.
        database["OPTIONS"] = {
            "pool": {"min_size": 1, "max_size": 16, "timeout": 2, "reconnect_timeout": 1},
            # The writer sends the same dozen statements for ever: prepared, they cost PostgreSQL
            # no planning. A pooler between must keep prepared statements (PgBouncer 1.21 does).
            "server_side_binding": True,
            "prepare_threshold": 3,
        }
        database["CONN_HEALTH_CHECKS"] = True
    return database


DATABASES = {"default": _database()}
REDIS_URL = env.str("REDIS_URL", default="")
# The channel layer serves the dashboard's live pages; nothing of a request or its money needs it.
CHANNEL_LAYERS: dict[str, Any] = {
    "default": {
        "BACKEND": "channels_redis.core.RedisChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL]},
    }
    if REDIS_URL
    else {"BACKEND": "channels.layers.InMemoryChannelLayer"}
}

# --- People --------------------------------------------------------------------------------------
AUTH_USER_MODEL = "dashboard.User"
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "home"
LOGOUT_REDIRECT_URL = "login"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]
AUTH_PASSWORD_VALIDATORS[1]["OPTIONS"] = {"min_length": 12}  # type: ignore[assignment]
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.Argon2PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]

# --- Web -----------------------------------------------------------------------------------------
# Pages are for browsers and insist on TLS. /v1 is exempt: an SDK does not follow a redirect of a
# POST, so it speaks plain HTTP to whatever ends TLS in front of it.
HTTPS_ONLY = env.bool("HTTPS_ONLY", default=not DEBUG)
SECURE_SSL_REDIRECT = HTTPS_ONLY
SECURE_REDIRECT_EXEMPT = [r"^v1(/|$)", r"^healthz$", r"^readyz$"]
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if HTTPS_ONLY else None
SECURE_HSTS_SECONDS = int(timedelta(days=365).total_seconds()) if HTTPS_ONLY else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = HTTPS_ONLY
SECURE_HSTS_PRELOAD = HTTPS_ONLY
SESSION_COOKIE_SECURE = HTTPS_ONLY
CSRF_COOKIE_SECURE = HTTPS_ONLY
SESSION_COOKIE_AGE = int(timedelta(hours=12).total_seconds())
X_FRAME_OPTIONS = "DENY"
SECURE_REFERRER_POLICY = "same-origin"
STATIC_URL = "static/"
STATIC_ROOT = env.str("STATIC_ROOT", default=str(BASE_DIR / "staticfiles"))
# Served from the apps' own folders where nobody ran collectstatic, so a clone shows its pages.
WHITENOISE_USE_FINDERS = True
warnings.filterwarnings("ignore", message="No directory at", module="django.core.handlers")
LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True
USE_I18N = False

REST_FRAMEWORK = {
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_AUTHENTICATION_CLASSES": ["dashboard.authentication.ApiKeyAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "EXCEPTION_HANDLER": "dashboard.api.exception_handler",
    "UNAUTHENTICATED_USER": None,
}

# --- Celery --------------------------------------------------------------------------------------
CELERY_BROKER_URL = REDIS_URL or "memory://localhost"
CELERY_TASK_IGNORE_RESULT = True
CELERY_TIMEZONE = "UTC"
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_REDIRECT_STDOUTS = False
CELERY_BEAT_SCHEDULE = {
    "reap-lost": {"task": "billing.tasks.reap_lost", "schedule": 15.0},
    "balances": {"task": "billing.tasks.check", "args": ["balances"], "schedule": 300.0},
    "charges": {"task": "billing.tasks.check", "args": ["charges"], "schedule": 60.0},
    "costs": {"task": "billing.tasks.check", "args": ["costs"], "schedule": 60.0},
    "stuck": {"task": "billing.tasks.check", "args": ["stuck"], "schedule": 60.0},
    "anomalies": {"task": "billing.tasks.check", "args": ["anomalies"], "schedule": 300.0},
    "second-source": {"task": "gateway.tasks.compare_second_source", "schedule": 3600.0},
    "send-notices": {"task": "billing.tasks.send_notices", "schedule": 300.0},
    "seal-ledgers": {
        "task": "billing.tasks.seal_ledgers",
        "schedule": crontab(hour="0", minute="30"),
    },
    # At night, everything.
    **{
        f"all-{name}": {
            "task": "billing.tasks.check",
            "args": [name],
            "kwargs": {"is_full": True},
            "schedule": crontab(hour="3", minute="10"),
        }
        for name in ("balances", "charges", "costs", "trial_balance")
    },
    # Each line of the ledger is read for this; the newest are read before each seal.
    "all-digests": {
        "task": "billing.tasks.check",
        "args": ["digests"],
        "kwargs": {"is_full": True},
        "schedule": crontab(hour="5", minute="10", day_of_week="sun"),
    },
    "forget-old-runs": {
        "task": "billing.tasks.forget_old_runs",
        "schedule": crontab(hour="4", minute="10"),
    },
}

# --- Logs: ids, counts and durations; never a prompt, a completion or a key ----------------------
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {
        "redact_keys": {"()": "kiln_site.logs.RedactKeys", "prefix": KILN_KEY_PREFIX},
    },
    "formatters": {
        "line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"},
    },
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": "line",
            "filters": ["redact_keys"],
        }
    },
    "root": {"handlers": ["stderr"], "level": env.str("LOG_LEVEL", default="INFO")},
    # uvicorn's access log prints addresses whole: it goes through our handler and its filter.
    "loggers": {
        "uvicorn.access": {"handlers": ["stderr"], "propagate": False},
        # Scanners send wrong hosts all day; each got its 400, none is worth a traceback.
        "django.security.DisallowedHost": {"level": "CRITICAL"},
    },
}
