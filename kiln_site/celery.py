"""Celery's application. Its tasks reconcile; nothing on the path of a request waits for them."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "kiln_site.settings")

app = Celery("kiln")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
