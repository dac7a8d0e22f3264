"""Runs that several tests look at."""

from support.live_fixtures import *  # noqa: F403
