"""Evaluation: scores of checkpoints by tasks of the lm-evaluation-harness."""
