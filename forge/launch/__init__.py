"""How ranks start, find each other, stop and report."""
