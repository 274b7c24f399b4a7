"""The planner against measured steps on this machine."""
