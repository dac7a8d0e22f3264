"""Forge: raw text to a validated language-model checkpoint with one command."""

__version__ = "0.1.0"
