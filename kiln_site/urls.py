"""Routes of everything but the completions endpoint, which asgi.py routes to its consumer."""

from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
