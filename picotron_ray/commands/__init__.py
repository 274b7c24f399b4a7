"""Commands of ``picotron-ray``, a module a subject."""
