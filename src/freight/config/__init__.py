"""Frozen configuration: what a user may write, checked before anything runs."""
