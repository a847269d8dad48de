"""Tests mirror the modules; those on real sockets are at the top, named for what they prove."""
