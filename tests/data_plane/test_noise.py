"""The counter-based noise against its formula in plain integers, and against chance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from workers.noise import exponential_noise, hash_ids, row_keys


def keys_of(seeds: list[int], positions: list[int]) -> Tensor:
    return torch.from_numpy(row_keys(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int32)))


def reference_hash(seed: int, position: int, token_id: int) -> int:
    """The hash with Python's own integers."""

    def splitmix64(state: int) -> int:
        z = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    def murmur(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    key = splitmix64((splitmix64(seed) + position * 0x9E3779B97F4A7C15) % 2**64)
    return murmur(murmur(token_id ^ (key % 2**32)) ^ (key >> 32))


def test_the_hash_is_the_one_of_the_formula() -> None:
    seeds = [0, 1, 2**63 - 1, 987654321987654321]
    positions = [0, 1, 2**31 - 1, 12_345]
    hashed = hash_ids(keys_of(seeds, positions), 200)
    assert hashed.dtype == torch.int32
    expected = [[reference_hash(s, p, t) for t in range(200)] for s, p in zip(seeds, positions, strict=True)]
    assert (hashed.long() % 2**32).tolist() == expected


def neighbours(axis: str) -> Tensor:
    """(2**10, 2**10) hashes: neighbouring columns differ by one in `axis`; rows are far apart in the others."""
    n = 2**10
    far = [i * 1_000_003 for i in range(n)]
    if axis == "token id":
        return hash_ids(keys_of(far, [17] * n), n)
    varying = list(range(n))
    token_ids = torch.arange(n) * 13
    seeds, positions = (varying, [17] * n) if axis == "seed" else ([17] * n, varying)
    return hash_ids(keys_of(seeds, positions), 13 * n)[:, token_ids].T


@pytest.mark.parametrize("axis", ["token id", "seed", "position"])
def test_neighbours_have_independent_uniform_noise(axis: str) -> None:
    """Every statistic is a mean of 2**20 terms or so; 5 standard deviations, which chance exceeds in 1 of 10**6."""
    hashed = neighbours(axis).long() % 2**32
    assert len(np.unique(hashed.numpy())) > 0.999 * hashed.numel()
    bits = (hashed[..., None] >> torch.arange(32)) & 1
    limit = 5 * 0.5 / hashed.numel() ** 0.5
    assert (bits.double().mean(dim=(0, 1)) - 0.5).abs().max() < limit
    uniform = (hashed.double() + 0.5) / 2**32
    counts = torch.bincount((uniform * 256).long().flatten(), minlength=256).double()
    expected = hashed.numel() / 256
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < 5 * (2 * 255) ** 0.5
    centred = (uniform - 0.5) * 12**0.5
    for lag in (1, 2, 3, 16, 64):
        correlation = (centred[:, lag:] * centred[:, :-lag]).mean()
        assert abs(correlation) < 5 / hashed[:, lag:].numel() ** 0.5
        flips = (bits[:, lag:] != bits[:, :-lag]).double().mean(dim=(0, 1))
        assert (flips - 0.5).abs().max() < 5 * 0.5 / hashed[:, lag:].numel() ** 0.5


def test_no_two_ids_of_a_row_share_a_hash() -> None:
    assert len(set(hash_ids(keys_of([5], [6]), 151_936)[0].tolist())) == 151_936


def test_exponentials_are_precise_where_small_and_finite_everywhere() -> None:
    keys = keys_of(list(range(64)), [3] * 64)
    variates = exponential_noise(keys, 50_000)
    uniform = ((hash_ids(keys, 50_000).long() % 2**32).double() + 0.5) / 2**32
    exact = -torch.log1p(-uniform)
    is_small = exact < 1
    torch.testing.assert_close(variates.double()[is_small], exact[is_small], rtol=1e-6, atol=0)
    assert variates.isfinite().all()
    assert variates.min() > 0
    # Mean and variance of a standard exponential are 1; a fourth moment of 9 about the mean bounds their errors.
    deviation = variates.numel() ** -0.5
    assert abs(float(variates.double().mean()) - 1) < 5 * deviation
    assert abs(float(variates.double().var()) - 1) < 5 * 8**0.5 * deviation


def keys_that_hash_id_0_to(hashed: int) -> Tensor:
    """A row of keys under which token id 0 has the given hash: the finaliser run backwards."""
    x = hashed ^ (hashed >> 16)
    x = x * pow(0xC2B2AE35, -1, 2**32) % 2**32
    x = x ^ (x >> 13) ^ (x >> 26)
    x = x * pow(0x85EBCA6B, -1, 2**32) % 2**32
    x = x ^ (x >> 16)
    return torch.from_numpy(np.array([[0, x]], dtype=np.uint32).view(np.int32))


@pytest.mark.parametrize(
    ("hashed", "expected"),
    [(0, 2.0**-33), (1, 1.5 * 2.0**-32), (1000, 1000.5 * 2.0**-32), (2**31, float(np.log(2)))],
)
def test_the_variates_of_extreme_hashes(hashed: int, expected: float) -> None:
    variate = exponential_noise(keys_that_hash_id_0_to(hashed), 1)
    assert float(variate) == pytest.approx(expected, rel=5e-7)


def test_the_largest_hash_has_the_largest_variate_and_a_finite_one() -> None:
    """Its uniform variate rounds to 1 in float32."""
    largest = float(exponential_noise(keys_that_hash_id_0_to(2**32 - 1), 1))
    assert float(exponential_noise(keys_that_hash_id_0_to(2**32 - 1000), 1)) < largest < 24
