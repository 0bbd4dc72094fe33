"""The only room that knows both a model and a mesh: build, then wrap, in one visible order."""
