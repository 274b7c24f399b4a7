"""``bench comm``: seconds and bus bandwidth of each reducer by size and group, and the selector's choice."""
