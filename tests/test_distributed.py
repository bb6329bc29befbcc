"""Two processes that train one module: DDP and FSDP2 over gloo, against one process alone."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flashgen as fg
from flashgen import masks

B, H, S, D = 2, 2, 12, 4


@fg.attention(mask=masks.causal_document)
def biased(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(D, D)
        self.slope = torch.nn.Parameter(torch.rand(H))

    def forward(self, x: torch.Tensor, doc: torch.Tensor) -> Any:
        return biased(self.project(x), x, x, doc=doc, slope=self.slope)


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    doc = torch.randint(0, 3, (B, S), generator=generator).sort(-1).values
    return torch.randn(B, H, S, D, generator=generator), doc


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    found = []
    for parameter in module.parameters():
        grad = parameter.grad
        assert grad is not None
        found.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
    return found


def train(rank: int, port: int, how: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    alone, module = Block(), Block()
    module.load_state_dict(alone.state_dict())
    for other in range(2):
        (alone(*batch(other)).square().sum() / 2).backward()
    if how == "ddp":
        trained: Any = torch.nn.parallel.DistributedDataParallel(module)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        trained = fully_shard(module, mesh=mesh)
    trained(*batch(rank)).square().sum().backward()
    for mine, right in zip(gradients(module), gradients(alone), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_gradients_are_those_of_one_process(how: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(train, args=(port, how), nprocs=2)
