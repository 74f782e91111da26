"""Weights in and out: single tensors, whole checkpoints, and the formats they have on disk."""
