"""The fixture of each commit, unpacked once."""

from support.past_fixtures import *  # noqa: F403
