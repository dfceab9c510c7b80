"""The randomness of sampling: a counter-based hash of (seed, position, token id), and the draw that uses it.

No generator and no state: the noise of a token does not depend on the batch, on other rows, or on what was drawn
before, so a seeded request gives the same tokens alone, in a crowd and after preemption. The hash is 32-bit wrap-around
arithmetic, which a GPU kernel can repeat bit for bit. Called by `workers.sampler` and `workers.candidates`; knows
nothing of slots.

Shapes: N rows, V token ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.step import IntArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MURMUR_1 = 0x85EBCA6B - 2**32
_MURMUR_2 = 0xC2B2AE35 - 2**32
_MAX_EXPONENTIAL = 23.0
"""Above -log(2**-33), the largest variate that 32 bits can give; bounds the one whose float32 uniform rounds to 1."""


def row_keys(seeds: npt.NDArray[np.uint64], positions: IntArray) -> IntArray:
    """The (N, 2) int32 keys of rows that draw the token at `positions` (N,) of sequences with `seeds` (N,)."""
    mixed = _splitmix64(_splitmix64(seeds) + positions.astype(np.uint64) * _GOLDEN)
    return mixed.astype("<u8").view("<i4").reshape(-1, 2)


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One output of SplitMix64 (Steele, Lea and Flood, 2014) for each state."""
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hash_ids(keys: Tensor, num_ids: int, first_id: int = 0) -> Tensor:
    """Hash `num_ids` token ids from `first_id` on under each row's two keys: (N, 2) int32 -> (N, num_ids) int32.

    Two rounds of MurmurHash3's 32-bit finaliser, a key before each. Within a row the hash is a bijection.
    """
    ids = torch.arange(first_id, first_id + num_ids, dtype=torch.int32, device=keys.device)
    hashed = _murmur_finalise_(ids ^ keys[:, :1])
    return _murmur_finalise_(hashed.bitwise_xor_(keys[:, 1:]))


def _murmur_finalise_(x: Tensor) -> Tensor:
    # `>>` of int32 copies the sign; the masks make it the unsigned shift of the original.
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_MURMUR_1)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(_MURMUR_2)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def exponential_noise(keys: Tensor, num_ids: int, first_id: int = 0) -> Tensor:
    """Standard exponential variates of token ids from `first_id` on, finite and at least 2**-33: (N, num_ids) float32.

    The variate is -log1p(-u) of u = (h + 0.5) / 2**32: precise where it is small, and small variates win the draw.
    """
    hashed = hash_ids(keys, num_ids, first_id)
    # Both halves are exact in float32, so their sum is rounded once, and not at all where it is small.
    high = (hashed >> 16).bitwise_and_(0xFFFF).float()
    low = hashed.bitwise_and_(0xFFFF).float().add_(0.5)
    uniform = high.mul_(65536.0).add_(low).mul_(2.0**-32)
    return uniform.neg_().log1p_().neg_().clamp_(max=_MAX_EXPONENTIAL)


def perturbed_scores(logits: Tensor, temperature: Tensor, keys: Tensor, first_id: int = 0) -> Tensor:
    """Scores whose maximum is a draw from softmax(logits / temperature), by the Gumbel-max trick: (N, V) float32.

    `logits` (N, V) of any float dtype, of token ids from `first_id` on, -inf where one is excluded; `temperature` (N,)
    float32, 0 leaves the logits as they are; `keys` (N, 2) int32 from `row_keys`.
    """
    # The noise is scaled, not the logits: nothing overflows at a tiny temperature, and 0 needs no case of its own.
    noise = exponential_noise(keys, logits.shape[1], first_id).log_()
    return logits.float() - noise.mul_(temperature[:, None])
