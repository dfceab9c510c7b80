"""Draws what runs have come to: a picture for each policy over time, all on the same axes, and one that compares them.

matplotlib's object interface alone, and imported when something is drawn: no window, no state. Colours are those of
Okabe and Ito, which are told apart with any kind of colour vision. Called by `raytp.cli.experiment`.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raytp.experiment.curves import Curve, arrival_curve, count_curve, rate_curve, time_axis
from raytp.experiment.folder import COMPARISON, replacing
from raytp.experiment.running import Outcome
from raytp.experiment.spec import ExperimentSpec, LoseNode
from raytp.experiment.wording import describe_failure
from raytp.scaling import DeadlinePolicy, load_policy
from raytp.simulator.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN = "#222222", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#888888"
DPI = 130
_MAX_SLUG = 100
"""Characters; a file's name may have 255."""
_STYLE: Any = {
    "text.parse_math": False,  # a policy's name may hold anything
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a panel."""

    label: str
    color: str
    curve: Curve
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One of the axes of a policy's picture."""

    title: str
    height: float
    lines: Sequence[Line]
    is_filled: bool = False


@contextmanager
def style() -> Iterator[None]:
    """How all pictures look."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def runs_of(outcomes: Sequence[Outcome], policy: str) -> list[Results]:
    """The results of all of a policy's runs that have any."""
    return [each.results for each in outcomes if each.policy == policy and each.results is not None]


def policies_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Those that have been run, in their order."""
    return list(dict.fromkeys(each.policy for each in outcomes))


def draw_policies(spec: ExperimentSpec, outcomes: Sequence[Outcome]) -> dict[str, Figure]:
    """A figure for each policy that has results; their axes have the same limits."""
    times_s = time_axis([each.results for each in outcomes if each.results is not None])
    panels = {
        policy: _panels(spec, runs, times_s) for policy in policies_of(outcomes) if (runs := runs_of(outcomes, policy))
    }
    tops = [max(_top(panel) for panel in row) for row in zip(*panels.values(), strict=True)]
    with style():
        return {
            policy: _draw_policy(spec, policy, runs_of(outcomes, policy), rows, tops) for policy, rows in panels.items()
        }


def write_pictures(folder: Path, figures: Mapping[str, Figure], comparison: Figure) -> dict[str, str]:
    """PNG files; returns their names by policy, and that of the comparison by "". Raises ConfigError."""
    named = {policy: f"policy-{number}-{_slug(policy)}.png" for number, policy in enumerate(figures, 1)}
    for policy, figure in [*figures.items(), ("", comparison)]:
        with replacing(folder / named.get(policy, COMPARISON)) as path:
            save(figure, path)
    return {"": COMPARISON, **named}


def save(figure: Figure, path: Path) -> None:
    """As PNG, the same bytes for the same figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with style(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a name may have letters that the font lacks
        FigureCanvasAgg(figure).print_png(str(path), metadata={"Software": None}, pil_kwargs={"format": "png"})


def time_unit(longest_s: float) -> tuple[str, float]:
    """The unit in which so long a time is shown, and its seconds."""
    if longest_s < 600:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest_s < 4 * 3600 else ("hours", 3600.0)


def _panels(spec: ExperimentSpec, runs: Sequence[Results], times_s: np.ndarray) -> list[Panel]:
    def line(field: str, label: str, color: str, *, is_dashed: bool = False) -> Line:
        return Line(label=label, color=color, curve=count_curve(runs, field, times_s), is_dashed=is_dashed)

    panels = [
        Panel(
            title="replicas",
            height=1.5,
            lines=[
                line("ready", "ready", BLUE),
                line("pending", "pending", ORANGE),
                line("wanted", "wanted", BLACK, is_dashed=True),
            ],
        ),
        Panel(
            title=f"nodes, of {spec.cluster.gpus_per_node} GPU{'s' * (spec.cluster.gpus_per_node != 1)} each",
            height=0.8,
            lines=[line("nodes", "nodes", GREEN)],
            is_filled=True,
        ),
        Panel(
            title="requests, waiting for a replica or running in one",
            height=1.3,
            lines=[
                line("rows_running", "running", SKY),
                line("rows_waiting", "waiting", VERMILION),
            ],
        ),
        Panel(
            title="output tokens per second",
            height=1.0,
            lines=[Line(label="tokens/s", color=PURPLE, curve=rate_curve(runs, times_s))],
            is_filled=True,
        ),
    ]
    if spec.workload.trace is None and spec.workload.rate is None:
        return panels
    arrivals = Line(label="arrivals", color=GREY, curve=arrival_curve(runs, times_s))
    return [Panel(title="requests that arrive per second", height=0.6, lines=[arrivals], is_filled=True), *panels]


def _draw_policy(
    spec: ExperimentSpec, policy: str, runs: Sequence[Results], panels: Sequence[Panel], tops: Sequence[float]
) -> Figure:
    from matplotlib.figure import Figure

    longest_s = float(panels[0].lines[0].curve.times_s[-1])
    unit, unit_s = time_unit(longest_s)
    heights = [panel.height for panel in panels]
    figure = Figure(figsize=(8.4, 1.0 + 1.25 * sum(heights)), dpi=DPI, layout="constrained")
    figure.suptitle(f"{spec.name}: {policy}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0].tolist()
    for axes, panel, top in zip(every, panels, tops, strict=True):
        _draw_panel(axes, panel, top, unit_s)
    every[-1].set_xlim(0.0, longest_s * 1.02 / unit_s)
    _mark_times(every, spec, policy, runs, unit_s)
    every[-1].locator_params(axis="x", nbins=12, integer=True)
    every[-1].set_xlabel(textwrap.fill(f"{unit} since the job began{_about(spec, runs)}", 110))
    figure.align_ylabels()
    return figure


def _draw_panel(axes: Axes, panel: Panel, top: float, unit_s: float) -> None:
    for line in panel.lines:
        curve = line.curve
        times = curve.times_s / unit_s
        axes.plot(times, curve.mean, color=line.color, label=line.label, lw=1.5, ls="--" if line.is_dashed else "-")
        if panel.is_filled:
            axes.fill_between(times, 0.0, curve.mean, color=line.color, alpha=0.12, lw=0)
        axes.fill_between(times, curve.least, curve.most, color=line.color, alpha=0.25, lw=0)
    axes.set_ylim(0.0, 1.08 * top)
    axes.set_title(panel.title)
    axes.yaxis.set_major_formatter(_with_commas)
    axes.locator_params(axis="y", nbins=5 if panel.height > 1 else 3, integer=True)
    if len(panel.lines) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=len(panel.lines), borderaxespad=0.0)


def _with_commas(value: float, _: float) -> str:
    return f"{value:,.10g}"


def _mark_times(
    every: Sequence[Axes], spec: ExperimentSpec, policy: str, runs: Sequence[Results], unit_s: float
) -> None:
    """Vertical lines through all panels, with a word above the first."""
    marks = [("all done", float(np.mean([run.seconds for run in runs])), GREY, ":")]
    lost = [each for each in spec.failures if isinstance(each, LoseNode)]
    marks += [(f"node {each.node} is lost", each.at_s, VERMILION, "-") for each in lost]
    chosen = load_policy(policy)
    if isinstance(chosen, DeadlinePolicy):
        marks.append(("deadline", chosen.finish_by_s, BLACK, "--"))
    shown = [mark for mark in marks if mark[1] <= every[0].get_xlim()[1] * unit_s]
    above_legend = 2 if every[0].get_legend() is None else 13
    for index, (words, at_s, color, dashes) in enumerate(shown):
        is_left = at_s < 0.5 * unit_s * every[0].get_xlim()[1]
        for axes in every:
            axes.axvline(at_s / unit_s, color=color, ls=dashes, lw=1.1, zorder=1.5)
        every[0].annotate(
            words,
            (at_s / unit_s, 1.0),
            (3 if is_left else -3, above_legend + 10 * index),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="left" if is_left else "right",
            va="bottom",
            color=color,
            fontsize=8,
        )


def _about(spec: ExperimentSpec, runs: Sequence[Results]) -> str:
    """What the picture does not say by itself."""
    words = []
    if len(runs) > 1:
        words.append(f"mean of {len(runs)} seeds, shaded from least to most")
    words += [describe_failure(each) for each in spec.failures if not isinstance(each, LoseNode)]
    return f"  ({'; '.join(words)})" if words else ""


def _top(panel: Panel) -> float:
    return max(1.0, *(float(line.curve.most.max()) for line in panel.lines))


def _slug(policy: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", policy).strip("-")[:_MAX_SLUG]
