"""What proves a model to somebody who does not have the run: statement, signature, verification."""
