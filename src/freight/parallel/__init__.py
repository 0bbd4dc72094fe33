"""Meshes and the parallel twins of local parts."""
