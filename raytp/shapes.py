"""Models by name whose sizes are known, and whose weights nobody has: for benchmarks and simulations.

Called by those, and by `raytp.model_source`, which says what a shape is not.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "bench" / "shapes"


def find_shape(name: str) -> Path | None:
    """Where the config.json of this shape lies; None if there is none of this name."""
    return next((path for path in _FOLDER.iterdir() if path.name == name), None)
