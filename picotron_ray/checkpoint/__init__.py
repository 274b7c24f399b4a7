"""Snapshots in host memory, and checkpoints in storage.

Nothing that was committed is ever lost. Bottom up:

- ``snapshot``: slots in host memory that outlive the worker that wrote them
- ``storage``: the interface of an object store, a local folder and S3
- ``store``: objects of a run: chunks and manifests, the log that commits them, verification, collection
- ``torch_state``: live tensors to shards and back; it alone imports torch
"""
