"""VeOmni's Qwen3 attention on ranks of Ulysses sequence parallelism, each with a part of the rows, beside one rank."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

EDGES = [0, 9, 30, 64]


def main() -> None:
    import attnforge
    from attnforge.runtime.integrations.huggingface import attention_forward
    from attnforge.runtime.integrations.veomni import FULL_NAME

    attnforge.register_veomni()
    dispatch: Any = sys.modules["veomni.ops.kernels.attention"]
    state: Any = sys.modules["veomni.distributed.parallel_state"]
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    state.init_parallel_state(dp_size=1, ulysses_size=ranks, device_type="cpu")
    module: Any = nn.Module()
    module.is_causal = True
    module.config = type("Config", (), {"_attn_implementation": FULL_NAME})
    edges = torch.tensor(EDGES, dtype=torch.int32)
    named: dict[str, Any] = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "scaling": 0.3}
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, EDGES[-1], 16, generator=generator) for n in (4, 1, 1, 4))
    sinks = torch.randn(4, generator=generator)
    mine = slice(rank * EDGES[-1] // ranks, (rank + 1) * EDGES[-1] // ranks)
    cases: tuple[dict[str, Any], ...] = ({}, {"sliding_window": 5}, {"softcap": 2.0}, {"s_aux": sinks})
    for extra in cases:
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        part = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
        out, _ = attention_forward(module, whole[0], whole[1], whole[2], None, **named, **extra)
        ours, _ = dispatch.fused_attention_forward(module, *part, None, **named, **extra)
        torch.testing.assert_close(ours, out[:, mine], atol=2e-5, rtol=2e-5)
        exact = torch.autograd.grad(out, whole, dout.transpose(1, 2))
        gradients = torch.autograd.grad(ours, part, dout.transpose(1, 2)[:, mine])
        for a, b in zip(gradients, exact, strict=True):
            torch.testing.assert_close(a, b[:, :, mine], atol=2e-5, rtol=2e-5)
    if rank == 0:
        print(f"{ranks} ranks agree in VeOmni")
    dist.barrier()
    dist.destroy_process_group()
