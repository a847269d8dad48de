"""Routes of the pages. Everything of an organization lives below `/o/<its slug>/`."""

from django.contrib.auth.views import LoginView, LogoutView
from django.urls import path

from dashboard import credits, organization_settings, pages, statements

urlpatterns = [
    path("", pages.home, name="home"),
    path(
        "login/",
        LoginView.as_view(next_page="home", redirect_authenticated_user=True),
        name="login",
    ),
    path("login/link/<int:user_id>/<str:token>/", pages.LoginLink.as_view(), name="login-link"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("o/<slug:slug>/requests/", pages.requests, name="requests"),
    path(
        "o/<slug:slug>/requests/<str:generation_id>/", pages.request_detail, name="request-detail"
    ),
    path("o/<slug:slug>/credits/", credits.lines, name="credits"),
    path("o/<slug:slug>/statements/", statements.months, name="statements"),
    path("o/<slug:slug>/statements/<str:month>/", statements.page, name="statement"),
    path("o/<slug:slug>/statements/<str:month>.csv", statements.as_csv, name="statement-csv"),
    path("o/<slug:slug>/statements/<str:month>.json", statements.as_json, name="statement-json"),
    path("o/<slug:slug>/settings/", organization_settings.page, name="settings"),
]
