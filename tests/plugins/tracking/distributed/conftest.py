"""Runs that several tests look at."""

from support.live_fixtures import (  # noqa: F401
    bf16,
    launches,
    marked,
    nothing_outlives_its_test,
    one_rank_runs,
    runs,
    session_runs,
    solo,
    tiny_project,
    uninterrupted,
)
