#!/usr/bin/env python
"""Run a management command; `manage.py demo` brings its own environment."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "kiln_site.settings")
    if sys.argv[1:2] == ["demo"]:
        # The settings are read before a command runs, and production settings refuse to start
        # without a database, a secret and host names: the demo makes its own, under var/.
        from kiln_site.demo.environment import prepare

        prepare(sys.argv[2:])
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
