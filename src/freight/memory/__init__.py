"""Runners that trade memory for time: recompute and chunk streaming, and the tensor stores they keep things in."""
