"""Functions on tensors: attention, rotary embedding, norms, losses. Nothing here knows a model or a mesh."""
