"""A scaling policy of one's own: a function from what is seen to a number of replicas.

raytp experiment examples/autoscaling/bursts.yaml --policy my_policy:one_to_spare --policy queue:30
"""

from __future__ import annotations

import math

from raytp.scaling import Observation

HOLD_S = 120.0
"""How long a number stays before it shrinks: without it, replicas would come and go with every gap between requests."""


def one_to_spare(seen: Observation) -> int:
    """As many as the requests of this moment fill, and one more, which is ready when a burst begins."""
    requests = seen.rows_running + seen.rows_waiting
    wanted = math.ceil(requests / seen.rows_per_replica) + 1
    if wanted < seen.target and seen.seconds_since_change < HOLD_S:
        return seen.target
    return wanted
