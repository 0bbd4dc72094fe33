"""The measurements behind every claim."""
