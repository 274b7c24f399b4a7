"""Process groups that can be aborted, and the reductions over them."""
