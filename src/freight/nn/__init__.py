"""The decoder: math only. Nothing here knows a mesh, a schedule or a file."""
