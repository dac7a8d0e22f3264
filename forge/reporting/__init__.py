"""Output for people: status, logs, results, the report."""
