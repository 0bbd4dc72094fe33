"""Saved state, and weights of other programs."""
