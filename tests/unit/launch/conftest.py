"""A launch that several tests look at."""

from support.launch_fixtures import *  # noqa: F403
