"""One rank of a job, for test_agreement.py: prints where it begins, and what it takes first.

python ranks_that_agree.py STORE RANK WORLD_SIZE DIRECTORY TIMEOUT [load]
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch.distributed as dist

from bagelplane.client import PackedLoader
from bagelplane.errors import BagelplaneError

store, rank, world_size, directory, timeout, *wishes = sys.argv[1:]
dist.init_process_group(
    "gloo",
    init_method=f"file://{store}",
    rank=int(rank),
    world_size=int(world_size),
    timeout=timedelta(seconds=60),
)
try:
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
