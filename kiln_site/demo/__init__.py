"""What `manage.py demo` and the tests talk to: a bundled model server, and a real small model."""
