"""The data plane: one process per rank, holding its shard of the model and of the KV cache.

Knows of the control plane only the step contract (`scheduler.step`) and the root of the errors. Knows nothing of text,
requests or Ray: `raytp` turns these plain classes into actors.
"""
