"""Tells that the model has answered, and waits to be killed."""

import time
from pathlib import Path


def wait(doc, results):
    (Path(__file__).parent / "reached").touch()
    time.sleep(600)
