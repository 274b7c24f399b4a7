"""Parallelism: the cutting of one model over the processes of a generation."""
