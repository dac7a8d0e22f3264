"""Proof of a model for somebody who does not have the run: statement, signature, verification."""
