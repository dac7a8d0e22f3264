"""What people read: status, logs, results, the report."""
