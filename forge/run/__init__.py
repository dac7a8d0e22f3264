"""The life of a run: launches, requeues, restarts after a lost node, crash-loop detection."""
