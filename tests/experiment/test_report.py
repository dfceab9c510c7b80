"""The report: every run is in it, and it needs no other file."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from raytp.experiment.comparison import draw_comparison
from raytp.experiment.pictures import draw_policies, write_pictures
from raytp.experiment.report import write_report
from raytp.experiment.side_by_side import make_rows
from raytp.experiment.tables import write_tables
from tests.experiment.small_experiment import run

_VOID = {"meta", "img"}


class _Page(HTMLParser):
    """Tables, sources and the order of tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.sources: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], _Page]:
    folder = tmp_path_factory.mktemp("report")
    spec, outcomes = run(
        folder,
        name="<b>bold</b> & co",
        policies=["fixed", "queue:2", "math:floor"],
        failures=[{"lose_node": {"at_s": 4}}, {"slow_steps": {"seconds": 0.01}}],
    )
    records = write_tables(folder, spec, outcomes)
    pictures = write_pictures(folder, draw_policies(spec, outcomes), draw_comparison(spec, outcomes))
    path = write_report(folder, spec, (folder / "small.yaml").read_text(), records, pictures)
    return folder, records, _Page(path.read_text())


def test_it_is_whole_and_what_stands_in_it_is_no_markup(made: tuple[Path, list[dict[str, Any]], _Page]) -> None:
    _, _, page = made
    assert page.open == []
    assert "<b>bold</b> & co" in page.words


def test_it_has_every_run(made: tuple[Path, list[dict[str, Any]], _Page]) -> None:
    _, records, page = made
    for record in records:
        (row,) = [row for row in page.rows if row[:2] == [record["policy"], str(record["seed"])]]
        if record["error"]:
            assert row[2] == record["error"]
        else:
            assert row[2] == f"{record['seconds']:,.0f}"
            assert f"{record['cost']:,.2f}" in row


def test_it_has_policies_side_by_side_the_file_and_what_goes_wrong(
    made: tuple[Path, list[dict[str, Any]], _Page],
) -> None:
    folder, records, page = made
    for row in make_rows(records, ["fixed", "queue:2", "math:floor"]):
        (found,) = [each for each in page.rows if each[0] == row.label]
        assert [text.split()[0] for text in found[1:]] == [cell.text for cell in row.cells]
    assert (folder / "small.yaml").read_text() in page.words
    failures = "node 0 is lost after 4 s; every replica takes 0.01 s longer for each step"
    assert any(failures in words for words in page.words)


def test_its_pictures_are_inside(made: tuple[Path, list[dict[str, Any]], _Page]) -> None:
    folder, _, page = made
    pictures = {path.read_bytes() for path in folder.glob("*.png")}
    assert len(pictures) == len(page.sources) == 3
    assert {base64.b64decode(re.sub("^data:image/png;base64,", "", source)) for source in page.sources} == pictures


def test_the_best_are_marked_and_spreads_are_shown() -> None:
    def record(policy: str, seconds: float) -> dict[str, Any]:
        return {"policy": policy, "seconds": seconds, "peak_replicas": seconds, "num_failed": 0}

    rows = make_rows([record("a", 10), record("a", 20), record("b", 30)], ["a", "b", "failed"])
    seconds, peak = rows
    assert [(cell.text, cell.spread, cell.is_best) for cell in seconds.cells] == [
        ("15", "10 to 20", True),
        ("30", "", False),
        ("-", "", False),
    ]
    assert not any(cell.is_best for cell in peak.cells)
