"""Measure the machines that a run would use."""
