"""Coordinates and sizes: values to embeddings, hidden states to bins, bins to values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kestrel.kernels.vision import fourier_features
from kestrel.layers.linear import normal_parameter
from kestrel.layers.mlp import Mlp
from kestrel.moondream.config import RegionConfig


class RegionModel(nn.Module):
    """Encoders and decoders; parameters carry the names of the published checkpoints.

    Decoders read the text model's un-normalised stream. Moondream 2 decodes through an MLP; Moondream 3 through one
    matrix, with a LayerNorm in front when the checkpoint has one.
    """

    def __init__(self, config: RegionConfig) -> None:
        super().__init__()
        self.coord_features = normal_parameter(1, config.coord_feat_dim // 2)
        self.coord_encoder = nn.Linear(config.coord_feat_dim, config.dim)
        self.size_features = normal_parameter(2, config.size_feat_dim // 2)
        self.size_encoder = nn.Linear(config.size_feat_dim, config.dim)
        self.coord_decoder = _decoder(config, config.coord_out_dim)
        self.size_decoder = _decoder(config, config.size_out_dim)
        self.ln = nn.LayerNorm(config.dim) if config.has_ln else None

    def encode_coord(self, values_N: Tensor) -> Tensor:
        """[N, dim] from coordinates, 0 to 1."""
        assert values_N.ndim == 1
        return _encode(values_N[:, None], self.coord_features, self.coord_encoder)

    def encode_size(self, values_N2: Tensor) -> Tensor:
        """[N, dim] from (width, height), 0 to 1."""
        assert values_N2.ndim == 2
        return _encode(values_N2, self.size_features, self.size_encoder)

    def decode_coord(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, bins] of one coordinate."""
        return self.coord_decoder(self._normalised(hidden_ND))

    def decode_size(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, 2, bins] of width and height."""
        return self.size_decoder(self._normalised(hidden_ND)).unflatten(1, (2, -1))

    def _normalised(self, hidden_ND: Tensor) -> Tensor:
        assert hidden_ND.ndim == 2
        return hidden_ND if self.ln is None else self.ln(hidden_ND)


def coord_from_bins(bins: Tensor, num_bins: int = 1024) -> Tensor:
    """bin / num_bins, fp32."""
    return bins.float() / num_bins


def size_from_bins(bins: Tensor, num_bins: int = 1024) -> Tensor:
    """2^(10·bin / (num_bins - 1) - 10), fp32: 2^-10 to 1."""
    # The power in fp64: in fp32 its last bit depends on the place in the batch on some processors.
    return torch.exp2((bins.float() / (num_bins - 1) * 10.0 - 10.0).double()).float()


NEAR = 16
"""Bins that count as the same place: a share of 1.6 % of the picture's side, or a size that is a tenth larger."""


def logprob_around(logits: Tensor, bins: Tensor, near: int = NEAR) -> Tensor:
    """Log-probability, in fp32, that the value is within `near` bins of `bins`. Logits [..., C], bins [...]."""
    distance = (torch.arange(logits.shape[-1], device=logits.device) - bins[..., None]).abs()
    around = logits.masked_fill(distance > near, -torch.inf)
    return around.logsumexp(-1) - logits.logsumexp(-1)


def _encode(values_NC: Tensor, frequencies_CF: Tensor, encoder: nn.Linear) -> Tensor:
    return encoder(fourier_features(values_NC, frequencies_CF).to(encoder.weight.dtype))


def _decoder(config: RegionConfig, out_dim: int) -> nn.Module:
    if config.inner_dim is None:
        return nn.Linear(config.dim, out_dim)
    return Mlp(config.dim, config.inner_dim, out_dim)
