"""Prompt: text that continues a prompt, by a run's checkpoint."""
