"""Routes of everything but the completions endpoint, which asgi.py routes to its consumer."""

from django.contrib import admin
from django.urls import include, path, re_path

from gateway import views

admin.site.site_header = "Kiln operators"
admin.site.site_title = "Kiln"
admin.site.index_title = "Operations"

handler400 = "kiln_site.handlers.bad_request"
handler404 = "kiln_site.handlers.not_found"
handler500 = "kiln_site.handlers.server_error"

urlpatterns = [
    path("healthz", views.healthz),
    path("readyz", views.readyz),
    path("v1/models", views.models),
    path("v1/models/<path:model_id>", views.model),
    path("v1/", include("dashboard.api_urls")),
    re_path(r"^v1(/.*)?$", views.not_found),
    path("admin/", admin.site.urls),
    path("", include("dashboard.urls")),
]
