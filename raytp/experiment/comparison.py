"""The picture that puts policies side by side: time, GPU time, cost, latency. Called by `raytp.cli.experiment`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from raytp.experiment.pictures import (
    BLUE,
    DPI,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    policies_of,
    runs_of,
    style,
)
from raytp.experiment.running import Outcome
from raytp.experiment.spec import ExperimentSpec
from raytp.simulator.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LATENCIES = (
    ("ttft", "time to the first token, seconds"),
    ("per_token", "time between tokens, milliseconds"),
    ("end_to_end", "time of a whole request, seconds"),
)
_MARKERS = (("p50", "o", SKY), ("p90", "D", BLUE), ("p99", "s", VERMILION))
_LABEL_CHARACTERS = 24
_LOG_FROM = 30.0
"""Where the largest of a panel's values is so many times the least, its axis is logarithmic."""


def draw_comparison(spec: ExperimentSpec, outcomes: Sequence[Outcome]) -> Figure:
    """Bars and points are means over seeds; thin lines go from the least to the most."""
    from matplotlib.figure import Figure

    policies = policies_of(outcomes)
    runs = [runs_of(outcomes, policy) for policy in policies]
    with style():
        figure = Figure(figsize=(10.5, 2.2 + 0.75 * len(policies)), dpi=DPI, layout="constrained")
        figure.suptitle(f"{spec.name}: the policies side by side", x=0.01, ha="left", fontsize=12, fontweight="bold")
        every = figure.subplots(2, 3, sharey=True)
        _draw_bars(every[0, 0], runs, "time to finish, seconds", [("", BLUE, lambda run: run.seconds)])
        parts: list[tuple[str, str, Callable[[Results], float]]] = [
            ("used", GREEN, lambda run: run.busy_gpu_seconds),
            ("wasted", ORANGE, lambda run: run.gpu_seconds - run.busy_gpu_seconds),
        ]
        _draw_bars(every[0, 1], runs, "GPU-seconds paid for", parts)
        price = spec.price_per_gpu_hour
        if price is None:
            _draw_bars(every[0, 2], runs, "most replicas at once", [("", PURPLE, _peak)])
        else:
            cost = lambda run: float(run.summary(price)["cost"])  # noqa: E731
            _draw_bars(every[0, 2], runs, f"cost, at {price:g} per GPU-hour", [("", PURPLE, cost)])
        for axes, (key, title) in zip(every[1], _LATENCIES, strict=True):
            _draw_latencies(axes, runs, key, title)
        every[0, 0].set_yticks(range(len(policies)), [_wrapped(policy) for policy in policies])
        every[0, 0].set_ylim(len(policies) - 0.5, -0.5)
    return figure


def _wrapped(policy: str) -> str:
    if len(policy) <= _LABEL_CHARACTERS:
        return policy
    module, colon, function = policy.partition(":")
    return "\n".join(line for part in (module + colon, function) for line in textwrap.wrap(part, _LABEL_CHARACTERS))


def _peak(run: Results) -> float:
    return float(max((tick.ready for tick in run.ticks), default=0))


def _draw_bars(
    axes: Axes,
    runs: Sequence[Sequence[Results]],
    title: str,
    parts: Sequence[tuple[str, str, Callable[[Results], float]]],
) -> None:
    """Parts of a bar follow one another; its label is their sum."""
    axes.set_title(title)
    axes.grid(axis="y", visible=False)
    for row, of_policy in enumerate(runs):
        values = np.array([[value(run) for _, _, value in parts] for run in of_policy]).reshape(-1, len(parts))
        if not len(values):
            axes.text(0.0, row, " failed", color=VERMILION, va="center")
            continue
        start = 0.0
        for (label, color, _), width in zip(parts, values.mean(axis=0), strict=True):
            axes.barh(row, width, 0.55, left=start, color=color, label=label, alpha=0.85)
            start += float(width)
        sums = values.sum(axis=1)
        axes.plot([sums.min(), sums.max()], [row, row], color="black", lw=1.2, solid_capstyle="butt")
        axes.annotate(
            f"{start:,.3g}" if start < 1000 else f"{start:,.0f}", (sums.max(), row), (5, 0), va="center", **_OFFSET
        )
    axes.margins(x=0.18)
    axes.set_xlim(left=0.0)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    if len(parts) > 1:
        _legend_of_first(axes, len(parts))


_OFFSET: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}


def _draw_latencies(axes: Axes, runs: Sequence[Sequence[Results]], key: str, title: str) -> None:
    axes.set_title(title)
    axes.grid(axis="y", visible=False)
    scale = 1000.0 if key == "per_token" else 1.0
    seen: list[float] = []
    for row, of_policy in enumerate(runs):
        latencies = [run.latencies()[key] for run in of_policy if run.latencies()[key]]
        if not latencies:
            continue
        means = [float(np.mean([each[name] for each in latencies])) * scale for name, _, _ in _MARKERS]
        axes.plot(means, [row] * len(means), color=GREY, lw=1.0, zorder=1.5)
        for (name, marker, color), mean in zip(_MARKERS, means, strict=True):
            axes.plot(mean, row, marker, color=color, ms=6.5, label=name, ls="none")
            all_of_name = [each[name] * scale for each in latencies]
            axes.plot([min(all_of_name), max(all_of_name)], [row + 0.22] * 2, color=color, lw=1.5)
            seen.append(mean)
        axes.annotate(f"{means[-1]:,.3g}", (means[-1], row), (7, 0), va="center", **_OFFSET)
    if seen and min(seen) > 0 and max(seen) > _LOG_FROM * min(seen):
        axes.set_xscale("log")
        axes.margins(x=0.2)
    else:
        axes.set_xlim(0.0, 1.2 * max(seen, default=1.0))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    _legend_of_first(axes, len(_MARKERS))


def _legend_of_first(axes: Axes, num_columns: int) -> None:
    """Each label once, below the axes."""
    handles, labels = axes.get_legend_handles_labels()
    first = dict(zip(reversed(labels), reversed(handles), strict=True))
    names = [name for name in dict.fromkeys(labels) if name]
    axes.legend(
        [first[name] for name in names],
        names,
        loc="upper right",
        bbox_to_anchor=(1.0, -0.16),
        ncols=num_columns,
        borderaxespad=0.0,
        handletextpad=0.3,
        columnspacing=1.0,
    )
