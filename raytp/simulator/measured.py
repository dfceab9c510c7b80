"""GPUs whose coefficients are known. Entered from `benchmarks/simulation.py --fit`; a test fits them again."""

from __future__ import annotations

from dataclasses import dataclass

from raytp.bench.floor import hardware_of
from raytp.errors import ConfigError
from raytp.simulator.step_time import Coefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    device_name: str
    """As CUDA and the records of `raytp bench` have it."""
    coefficients: Coefficients

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes and operations a second that it reaches at best."""
        hardware = hardware_of((self.device_name,), "bfloat16")
        assert hardware is not None
        return hardware.bytes_per_s, hardware.flop_per_s


GPUS = {
    "h200": Gpu(
        device_name="NVIDIA H200",
        # Fitted to 2026-11-30-h200-tp1-second.json and 2026-11-30-h200-tp2-third.json.
        coefficients=Coefficients(
            bytes_per_s=3.784e12,
            flop_per_s=7.11e14,
            layer_s=2.855e-05,
            eager_layer_s=0,
            eager_parallel_layer_s=0.0009091,
            shared_byte_s=1.561e-13,
            pair_flop_s=3.273e-15,
            all_reduce_layer_s=3.17e-06,
            all_reduce_byte_s=0,
            request_s=0.0008639,
            driver_step_s=0,
            driver_row_s=8.042e-06,
            driver_prompt_token_s=3.511e-07,
            memory_bytes=1.293e11,
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    """By its short name. Raises ConfigError if it was not measured."""
    if name not in GPUS:
        raise ConfigError(f"gpu={name!r} was not measured; known: {', '.join(GPUS)}")
    return GPUS[name]
