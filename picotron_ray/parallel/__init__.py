"""Parallelism: one model, cut over the processes of a generation."""
