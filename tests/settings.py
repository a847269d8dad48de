"""The project's settings, in the environment of a test run."""

import os

from tests import environment  # noqa: F401  before the settings: it sets what they read

from kiln_site.settings import *  # noqa: F403  isort: skip

# Processes that tests start are not test runs: they read the project's own settings.
os.environ["DJANGO_SETTINGS_MODULE"] = "kiln_site.settings"
