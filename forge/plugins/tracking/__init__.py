"""Trackers: numbers of a run for TensorBoard, Weights & Biases and MLflow, sent by their own process."""
