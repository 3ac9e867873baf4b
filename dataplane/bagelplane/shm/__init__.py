"""Shared memory between sidecar and trainer: the ring file, the layout of a pack in it, and the messages
beside it.

- `ring`: a preallocated file of variable-size records. One producer process writes it; readers map it read-
  only.
- `record`: how a pack lies in a record.
- `protocol`: the messages on the Unix socket next to the ring (doorbell, acknowledge, snapshot, status).

Both sides import this package, so nothing of storage, sources, stream, sidecar or client is imported here,
and no torch, Pillow or pyarrow. Nothing is ever unpickled. What comes from the file or the socket is checked
before use: garbage gives `RingError` or `ProtocolError`, never a crash.
"""
