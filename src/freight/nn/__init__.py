"""The decoder: math only. Nothing here knows a mesh; what parallelism changes stands behind a protocol."""
