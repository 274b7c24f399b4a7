"""How one model is cut over the processes of a generation."""
