"""Messages of every type, for tests of the protocol and for the fuzzing of it."""

from __future__ import annotations

from bagelplane.shm.protocol import (
    Ack,
    Attach,
    Attached,
    Detach,
    Error,
    Hello,
    Message,
    Published,
    Resume,
    Seek,
    Snapshot,
    Snapshotted,
    Status,
    StatusRequest,
    Waiting,
    Welcome,
)

FROM_CLIENT: list[Message] = [
    Hello(1, "trainer"),
    Attach(3, 1, 8),
    Attach(3, 1, 8, 2, Resume("none")),
    Attach(0, 0, 1, 0, Resume("step", 12)),
    Attach(0, 0, 1, 0, Resume("state", 12, {"rng": [1, 2**63, 0.5, None, True, "x"], "nested": {"a": []}})),
    Attach(0, 0, 1, 0, Resume("position", 3, position=12)),
    Ack(2**64 - 1),
    Snapshot(),
    Seek(0),
    StatusRequest(),
    Detach(),
]
FROM_SIDECAR: list[Message] = [
    Welcome(1, "bagel-sft", "ab12"),
    Attached("/run/ring-0.bin", 7, 4096, 12),
    Published(12, 4160, 100, 7),
    Snapshotted(12, "s3://bucket/snapshots"),
    Status({"ranks": [{"step": 1}]}),
    Waiting("reading s3://bucket/a.parquet", 1.5),
    Waiting("reading", 2),
    Error("data", "what", "fix", False),
]
