"""GPUs whose coefficients are known. Entered from `benchmarks/simulation.py --fit`; a test fits them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raytp.bench.floor import hardware_of
from raytp.errors import ConfigError
from raytp.simulator.step_time import Coefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    device_name: str
    """As CUDA and the records of `raytp bench` have it."""
    coefficients: Coefficients
    limits: Mapping[str, int] = field(default_factory=dict)
    """What an engine on such a device does not have as on a GPU, as `SchedulerConfig` names it."""

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes and operations a second that it reaches at best. Raises ConfigError if they are not known."""
        hardware = hardware_of((self.device_name,), "bfloat16")
        if hardware is None:
            raise ConfigError(f"nothing can be fitted to records of {self.device_name}: its best rates are not known")
        return hardware.bytes_per_s, hardware.flop_per_s


GPUS = {
    "h200": Gpu(
        device_name="NVIDIA H200",
        # Fitted to 2026-12-01-h200-prefill-graphs.json.
        coefficients=Coefficients(
            bytes_per_s=3.87e12,
            flop_per_s=6.478e14,
            layer_s=1.877e-05,
            eager_layer_s=0,
            eager_parallel_layer_s=7.978e-05,
            shared_byte_s=1.891e-13,
            pair_flop_s=3.984e-15,
            all_reduce_layer_s=2.683e-06,
            all_reduce_byte_s=3.494e-12,
            request_s=0.0006181,
            driver_step_s=0,
            driver_row_s=6.165e-06,
            driver_prompt_token_s=3.299e-07,
            memory_bytes=1.288e11,
        ),
    ),
    # Rough, and set by hand to seven cases of `raytp bench` on two cores of an EPYC that others used, too: SmolLM2-135M
    # and a model of four layers, in float32 on one rank. Six are met within a quarter, one is said to take half as long
    # again. The sums over ranks are a guess, and what replicas take from one another on shared cores is not in it.
    "cpu": Gpu(
        device_name="CPU",
        coefficients=Coefficients(
            bytes_per_s=1.2e10,
            flop_per_s=6e10,
            layer_s=6e-4,
            eager_layer_s=0,
            eager_parallel_layer_s=0,
            shared_byte_s=1e-10,
            pair_flop_s=2.5e-11,
            all_reduce_layer_s=1.5e-3,
            all_reduce_byte_s=0,
            request_s=1e-3,
            driver_step_s=4e-4,
            driver_row_s=1e-5,
            driver_prompt_token_s=0,
            memory_bytes=2.7e9,
            row_layer_s=3e-4,
            dtype_bytes=4,
        ),
        limits={"max_num_batched_tokens": 512},
    ),
}


def find_gpu(name: str) -> Gpu:
    """By its short name. Raises ConfigError if it was not measured."""
    if name not in GPUS:
        raise ConfigError(f"gpu={name!r} was not measured; known: {', '.join(GPUS)}")
    return GPUS[name]
