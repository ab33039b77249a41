"""What a run is for: to choose a learning rate, or to count."""

__all__ = ["FINAL", "SWEEP"]

SWEEP, FINAL = "sweep", "final"
