"""A stand-in for the attention of BAGEL's VAE."""

import torch
from torch import Tensor, nn


class AttnBlock(nn.Module):
    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, in_channels)
        self.q = nn.Conv2d(in_channels, in_channels, 1)
        self.k = nn.Conv2d(in_channels, in_channels, 1)
        self.v = nn.Conv2d(in_channels, in_channels, 1)
        self.proj_out = nn.Conv2d(in_channels, in_channels, 1)

    def attention(self, h_: Tensor) -> Tensor:
        h_ = self.norm(h_)
        q, k, v = (
            part(h_).flatten(2).transpose(1, 2)[:, None].contiguous() for part in (self.q, self.k, self.v)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return out[:, 0].transpose(1, 2).reshape(h_.shape)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.proj_out(self.attention(x))
        return result


class Encoder(nn.Module):
    """What the encoder has of it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attn_1 = AttnBlock(channels)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn_1(x)
        return out
