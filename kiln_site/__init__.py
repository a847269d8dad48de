"""The house itself: settings, routes, the ASGI application, Celery and the demo."""

from kiln_site.celery import app as celery_app

__all__ = ["celery_app"]
