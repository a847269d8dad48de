from django.apps import AppConfig


class DemoConfig(AppConfig):
    name = "kiln_site.demo"
