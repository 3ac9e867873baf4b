"""One rank of a training job, for test_trainers.py; torchrun starts it.

torchrun training_rank.py DIRECTORY FOLDER STEPS [--save-at STEP] [--hang-at STEP] [--die-at STEP]

DIRECTORY: the sidecar's. FOLDER: where the ranks' records and the checkpoint lie; a checkpoint that is there is
loaded. Each rank writes a line of JSON for each thing that happens to it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from bagelplane.client import PackedLoader
from tests.golden.hashing import describe, digest

DEADLINE_SECONDS = 300.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--save-at", type=int)
    parser.add_argument("--hang-at", type=int, help="wait there to be killed")
    parser.add_argument("--die-at", type=int, help="rank 1 is killed there once, when rank 0 has that pack")
    return parser.parse_args()


def wait_for(text: str, record: Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while text not in record.read_text():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"waited {DEADLINE_SECONDS} s for {text} in {record.name}: {record.read_text()}"
            )
        time.sleep(0.01)


def weights_digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(
        b"".join(weights.numpy().tobytes() for weights in model.state_dict().values())
    ).hexdigest()


def train(options: argparse.Namespace, rank: int) -> None:
    record = options.folder / f"rank-{rank}.jsonl"

    def tell(**facts: Any) -> None:
        with record.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    tell(pid=os.getpid())
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Embedding(1024, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = PackedLoader(options.directory, timeout_seconds=DEADLINE_SECONDS)
    # Each rank's place under a key of its own; the model's weights are the same on all.
    state = {"model": model.state_dict(), f"data/{rank}": loader}
    checkpoint = options.folder / "checkpoint"
    if checkpoint.exists():
        dcp.load(state, checkpoint_id=checkpoint)
        model.load_state_dict(state["model"])
    tell(begins=loader.step)
    while loader.step < options.steps:
        step = loader.step
        if step == options.hang_at:
            tell(hangs=step)
            time.sleep(DEADLINE_SECONDS)
        if step == options.die_at and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            wait_for(f'"step": {step},', options.folder / "rank-0.jsonl")
            os.kill(os.getpid(), signal.SIGKILL)
        batch = next(loader)
        tell(step=step, digest=digest(describe(batch)))
        loss = model(batch["packed_text_ids"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loader.step == options.save_at:
            dcp.save(state, checkpoint_id=checkpoint)
    tell(weights=weights_digest(model))
    loader.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(parse_arguments(), dist.get_rank())
    dist.destroy_process_group()
