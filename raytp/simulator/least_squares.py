"""Least squares without negative values. Called by `raytp.simulator.fit`."""

from __future__ import annotations

import numpy as np

from raytp.simulator.step_time import Floats

_TOLERANCE = 1e-9


def solve_nonnegative(matrix: Floats, target: Floats) -> Floats:
    """The x >= 0 for which |matrix @ x - target| is least: Lawson and Hanson's active-set method.

    `matrix`: (m, n), `target`: (m,). Lawson, Hanson: Solving Least Squares Problems, 1974, chapter 23.
    """
    scales = np.linalg.norm(matrix, axis=0)
    scales[scales == 0] = 1.0
    scaled = matrix / scales
    values = np.zeros(matrix.shape[1])
    is_free = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(30 * matrix.shape[1]):
        gradient = scaled.T @ (target - scaled @ values)
        gradient[is_free] = -np.inf
        if gradient.max() < _TOLERANCE:
            break
        is_free[gradient.argmax()] = True
        values = _descend(scaled, target, values, is_free)
    unscaled: Floats = values / scales
    return unscaled


def _descend(
    matrix: Floats, target: Floats, values: Floats, is_free: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> Floats:
    """The least squares over the free values; those that would turn negative stop being free, at 0."""
    while True:
        wanted: Floats = np.zeros_like(values)
        wanted[is_free] = np.linalg.lstsq(matrix[:, is_free], target, rcond=None)[0]
        negative = is_free & (wanted <= 0)
        if not negative.any():
            return wanted
        step = np.min(values[negative] / (values[negative] - wanted[negative]))
        values = values + step * (wanted - values)
        is_free &= values > _TOLERANCE
