"""A seeded simulation of several gateway workers: real writer, spool, billing and SQL.

`python -m tests.simulator --help`. Time is virtual, one thread does everything, and a fault can
happen at any call of the database or the disk. What happens follows from the seed alone, so that
a failure happens again whenever its seed is run again.
"""
