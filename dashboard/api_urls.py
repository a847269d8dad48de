"""Routes of the usage API below `/v1/`; none ends in a slash, and none redirects."""

from django.urls import path

from dashboard import api

urlpatterns = [
    path("generations/<str:generation_id>", api.GenerationDetail.as_view(), name="v1-generation"),
    path("statements/<str:month>", api.StatementDetail.as_view(), name="v1-statement"),
    path("credits", api.Credits.as_view(), name="v1-credits"),
    path("key", api.Key.as_view(), name="v1-key"),
]
