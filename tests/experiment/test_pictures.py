"""Pictures: that they are images, that what is drawn is what was found, and that policies share their axes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from raytp.experiment.comparison import draw_comparison
from raytp.experiment.curves import arrival_curve, count_curve, rate_curve, time_axis
from raytp.experiment.pictures import draw_policies, runs_of, save, time_unit, write_pictures
from raytp.experiment.running import Outcome
from raytp.experiment.spec import ExperimentSpec
from raytp.simulator.results import RequestTimes, Results, Tick
from tests.experiment.small_experiment import run

FAILURES = [{"lose_node": {"at_s": 5.0}}, {"slow_start": {"seconds": 1.0, "replica": 1}}]
Made = tuple[ExperimentSpec, list[Outcome]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return run(
        tmp_path_factory.mktemp("pictures"),
        policies=["fixed", "queue:2", "math:floor", "deadline:11"],
        failures=FAILURES,
        name="a $name$ with_marks",
    )


@pytest.fixture(scope="module")
def figures(made: Made) -> dict[str, Figure]:
    return draw_policies(*made)


def lines_of(axes: Axes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {
        str(line.get_label()): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
        for line in axes.lines
        if not str(line.get_label()).startswith("_")
    }


def widths_of(axes: Axes) -> list[float]:
    """Of the bars, as they were drawn."""
    return [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]


def test_each_policy_with_results_has_a_picture_of_the_same_axes(figures: dict[str, Figure]) -> None:
    assert list(figures) == ["fixed", "queue:2", "deadline:11"]
    titles = [[axes.get_title(loc="left") for axes in figure.axes] for figure in figures.values()]
    assert titles[0] == titles[1] == titles[2]
    assert titles[0] == [
        "requests that arrive per second",
        "replicas",
        "nodes, of 1 GPU each",
        "requests, waiting for a replica or running in one",
        "output tokens per second",
    ]
    for axes in zip(*(figure.axes for figure in figures.values()), strict=True):
        assert len({each.get_xlim() for each in axes}) == len({each.get_ylim() for each in axes}) == 1
    labels = {figure.axes[-1].get_xlabel() for figure in figures.values()}
    assert all(label.startswith("seconds since the job began") for label in labels)
    assert all("mean of 2 seeds" in label and "1 s longer to start" in label for label in labels)


def test_the_lines_are_the_means_of_the_counts(made: Made, figures: dict[str, Figure]) -> None:
    _, outcomes = made
    runs = runs_of(outcomes, "queue:2")
    drawn = lines_of(figures["queue:2"].axes[1])
    assert set(drawn) == {"ready", "pending", "wanted"}
    for name, (times, values) in drawn.items():
        for at_s, value in list(zip(times, values, strict=True))[::37]:
            assert value == pytest.approx(np.mean([held(each, name, float(at_s)) for each in runs])), (name, at_s)


def held(results: Results, name: str, at_s: float) -> float:
    """The count at a moment, by going through the ticks."""
    before = [tick for tick in results.ticks if tick.now_s <= at_s < results.seconds]
    return float(getattr(before[-1], name)) if before else 0.0


def test_a_lost_node_the_end_and_the_deadline_are_marked(made: Made, figures: dict[str, Figure]) -> None:
    _, outcomes = made
    end_s = np.mean([each.seconds for each in runs_of(outcomes, "deadline:11")])
    for axes in figures["deadline:11"].axes:
        marks = {
            float(np.asarray(line.get_xdata())[0]) for line in axes.lines if len(np.asarray(line.get_xdata())) == 2
        }
        assert marks == {5.0, float(end_s), 11.0}
    words = {text.get_text() for text in figures["deadline:11"].axes[0].texts}
    assert words == {"node 0 is lost", "all done", "deadline"}
    assert {text.get_text() for text in figures["fixed"].axes[0].texts} == {"node 0 is lost", "all done"}


def test_the_comparison_shows_every_policy_and_the_right_numbers(made: Made) -> None:
    spec, outcomes = made
    figure = draw_comparison(spec, outcomes)
    seconds, gpu_seconds, cost, *latencies = figure.axes
    assert [label.get_text() for label in seconds.get_yticklabels()] == [
        "fixed",
        "queue:2",
        "math:floor",
        "deadline:11",
    ]
    assert [axes.get_title(loc="left") for axes in latencies] == [
        "time to the first token, seconds",
        "time between tokens, milliseconds",
        "time of a whole request, seconds",
    ]
    for axes, value in ((seconds, "seconds"), (cost, "cost")):
        widths = widths_of(axes)
        expected = [
            np.mean([each.summary(3.5)[value] for each in runs_of(outcomes, policy)])
            for policy in ("fixed", "queue:2", "deadline:11")
        ]
        assert widths == pytest.approx(expected)
    used, wasted = widths_of(gpu_seconds)[:2]
    fixed = runs_of(outcomes, "fixed")
    assert used == pytest.approx(np.mean([each.busy_gpu_seconds for each in fixed]))
    assert used + wasted == pytest.approx(np.mean([each.gpu_seconds for each in fixed]))
    assert [text.get_text() for text in seconds.texts if "failed" in text.get_text()] == [" failed"]


def test_pngs_are_images_and_the_same_each_time(made: Made, figures: dict[str, Figure], tmp_path: Path) -> None:
    spec, outcomes = made
    names = write_pictures(tmp_path, figures, draw_comparison(spec, outcomes))
    assert names == {
        "": "comparison.png",
        "fixed": "policy-1-fixed.png",
        "queue:2": "policy-2-queue-2.png",
        "deadline:11": "policy-3-deadline-11.png",
    }
    save(draw_policies(spec, outcomes)["queue:2"], tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / names["queue:2"]).read_bytes()
    for name in names.values():
        with Image.open(tmp_path / name) as image:
            assert image.format == "PNG"
            assert min(image.size) > 500
            assert len(image.convert("RGB").getcolors(1 << 24) or []) > 50
        assert (tmp_path / name).stat().st_size < 150_000


def tick(now_s: float, ready: int, tokens_per_s: float) -> Tick:
    nothing = dict.fromkeys(("wanted", "pending", "nodes", "rows_waiting", "rows_running"), 0)
    return Tick(now_s=now_s, ready=ready, tokens_per_s=tokens_per_s, **nothing)


def results(seconds: float, ticks: list[Tick], arrivals: tuple[float, ...] = ()) -> Results:
    return Results(
        requests=[RequestTimes(arrival_s=at_s, output_tokens=1) for at_s in arrivals],
        ticks=ticks,
        seconds=seconds,
        gpu_seconds=0.0,
        busy_gpu_seconds=0.0,
        num_steps=0,
    )


def test_a_count_holds_until_the_next_tick_and_a_rate_since_the_one_before() -> None:
    long = results(10.0, [tick(0, 1, 0.0), tick(4, 3, 100.0), tick(8, 2, 50.0)], (0.0, 0.1, 9.9))
    short = results(6.0, [tick(0, 5, 0.0), tick(4, 5, 20.0)])
    times_s = time_axis([long, short])
    assert (times_s[0], times_s[-1]) == (0.0, 10.0)
    at = {second: int(np.searchsorted(times_s, second)) for second in (1, 5, 7, 9)}
    counts = count_curve([long, short], "ready", times_s)
    assert [counts.mean[at[second]] for second in (1, 5, 7, 9)] == [3.0, 4.0, 1.5, 1.0]
    assert [counts.least[at[second]] for second in (1, 5, 7, 9)] == [1.0, 3.0, 0.0, 0.0]
    assert [counts.most[at[second]] for second in (1, 5, 7, 9)] == [5.0, 5.0, 3.0, 2.0]
    rates = rate_curve([long], times_s)
    assert [rates.mean[at[second]] for second in (1, 5, 7, 9)] == [100.0, 50.0, 50.0, 0.0]
    arrivals = arrival_curve([long], times_s, num_bins=10)
    assert [arrivals.mean[at[second] - 1] for second in (1, 5)] == [2.0, 0.0]
    assert arrivals.mean[-1] == 1.0


@pytest.mark.parametrize(("longest_s", "unit"), [(5, "seconds"), (600, "minutes"), (20_000, "hours")])
def test_time_is_in_a_unit_that_fits(longest_s: float, unit: str) -> None:
    assert time_unit(longest_s)[0] == unit
