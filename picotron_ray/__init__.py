"""picotron_ray: elastic 4D-parallel LLM training on Ray."""

__version__ = "0.1.0"
