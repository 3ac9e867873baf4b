"""A training loop for torchrun. The model is a stand-in; of Bagelplane it needs `PackedLoader` alone."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagelplane.client import PackedLoader

STEPS = 24

dist.init_process_group("gloo")  # nccl on GPUs
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Embedding(4096, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

loader = PackedLoader()  # finds the sidecar; rank and world size from torch.distributed
if dist.get_rank() == 0:
    print(f"begins at step {loader.step} of {STEPS}", flush=True)
while loader.step < STEPS:  # a new job begins at the newest snapshot, not at 0
    step, batch = loader.step, next(loader)
    loss = model(batch["packed_text_ids"] % 4096).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(1)  # about what a model takes
    if dist.get_rank() == 0:
        print(f"step {step}: {batch['sequence_length']} tokens, loss {loss.item():.4f}", flush=True)

loader.close()
dist.destroy_process_group()
