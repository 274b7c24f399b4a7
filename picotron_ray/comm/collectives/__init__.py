"""Own algorithms of collectives over point-to-point messages, and the choice between them."""
