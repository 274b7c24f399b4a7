"""Sweeps over layouts, micro-batches and learning rates with Ray Tune: ``python -m tuning.sweep``."""
