"""Plugins: what a run can do without, a folder for each."""
