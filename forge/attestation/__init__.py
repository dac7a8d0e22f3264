"""Verification of an export by one file, which is handed on and imports nothing of Forge."""
