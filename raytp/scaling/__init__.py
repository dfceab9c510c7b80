"""How many replicas there should be: pure functions from an observation to a count.

`observation` (what a policy sees), `policies` (`fixed`, `queue`, `deadline`), `loading` (a policy by its text, also the
user's own), `blame` (where that one raised), `scaler` (limits, and the memory that pure functions lack), `meter` (what
a replica has shown it can do), `window` (how many rows it may have).
Driven by `raytp.simulator` and by real replicas alike. Knows nothing of Ray, of time other than what it is told, or of
how a replica is started or ended.
"""

from raytp.scaling.loading import load_policy
from raytp.scaling.meter import ArrivalMeter, RateMeter, StartMeter
from raytp.scaling.observation import Observation, Policy
from raytp.scaling.policies import DeadlinePolicy, FixedPolicy, QueuePolicy
from raytp.scaling.scaler import Scaler

__all__ = [
    "ArrivalMeter",
    "DeadlinePolicy",
    "FixedPolicy",
    "Observation",
    "Policy",
    "QueuePolicy",
    "RateMeter",
    "Scaler",
    "StartMeter",
    "load_policy",
]
