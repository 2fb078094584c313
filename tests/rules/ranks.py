"""One rank of a training that several processes share."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tracehooks

STEPS = 8


def main(path: Path, what: str) -> None:
    """Train, with what is wrong on rank 1: it is ``slow``, ``silent`` after three steps, or ``drifts``; or ``healthy``."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    model = body if what == "silent" else DistributedDataParallel(body)
    optimizer = torch.optim.SGD(body.parameters(), 1e-2)
    if what == "slow" and rank == 1:
        body[1].register_forward_hook(lambda module, args, output: time.sleep(0.05))
    data = torch.randn(STEPS, 16, 6, generator=torch.Generator().manual_seed(rank))
    with tracehooks.attach(model, path, quiet=True):
        for number in range(3 if what == "silent" and rank == 1 else STEPS):
            optimizer.zero_grad()
            (model(data[number]) - data[number].sum(-1, keepdim=True)).square().mean().backward()
            optimizer.step()
            if what == "drifts" and rank == 1 and number == 2:
                with torch.no_grad():
                    body[2].bias += 1.0
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
