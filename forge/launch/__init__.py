"""Start, rendezvous, stop and records of the ranks."""
