"""Routes of the pages. Everything of an organization lives below `/o/<its slug>/`."""

from django.contrib.auth.views import LoginView, LogoutView
from django.urls import path

from dashboard import pages

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
]
