"""One rank of a job, for test_agreement.py: prints where it begins, and what it takes first.

python ranks_that_agree.py STORE RANK WORLD_SIZE DIRECTORY TIMEOUT [load | verify]

verify: all are one data-parallel rank in pods of their own, and compare every second pack.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from bagelplane.client import PackedLoader
from bagelplane.errors import BagelplaneError


def verify_eight_packs(directory: str, timeout_seconds: float) -> None:
    """Prints how many readers this pod has, how far it came, and the steps whose digest is left in the store."""
    loader = PackedLoader(
        directory, local_rank=0, dp_rank=0, dp_size=1, verify_every=2, timeout_seconds=timeout_seconds
    )
    steps = 0
    try:
        with loader:
            for _ in range(8):
                next(loader)
                steps += 1
    finally:
        print(json.dumps({"steps": steps, "readers": loader.place.readers}), flush=True)
        dist.barrier()
    assert loader._peers is not None
    store, prefix = distributed_c10d._get_default_store(), f"{loader._peers.call}/digest/0"
    kept = [step for step in range(8) if store.check([f"{prefix}/{step}"])]
    print(json.dumps({"kept": kept}), flush=True)
    dist.barrier()


store, rank, world_size, directory, timeout, *wishes = sys.argv[1:]
dist.init_process_group(
    "gloo",
    init_method=f"file://{store}",
    rank=int(rank),
    world_size=int(world_size),
    timeout=timedelta(seconds=180),
)
try:
    if "verify" in wishes:
        verify_eight_packs(directory, float(timeout))
        sys.exit()
    with PackedLoader(directory, local_rank=0, timeout_seconds=float(timeout)) as loader:
        if "load" in wishes:
            loader.resume(step=1)
        if int(rank) == 0:
            print(json.dumps({"begins": loader.step}), flush=True)
        else:
            # A collective that rank 0 comes to later: an agreement by collectives would be taken for it.
            waiting = dist.barrier(async_op=True)
        batch = next(loader)
        print(json.dumps({"took": batch["batch_data_indexes"][0]["data_indexes"][0]}), flush=True)
        if int(rank) == 0:
            dist.barrier()
        else:
            waiting.wait()
except BagelplaneError as error:
    print(json.dumps({"error": str(error)}), flush=True)
