"""The table and the page: complete, honest about nothing, and drawn without a network."""

from __future__ import annotations

import re
import warnings
from html.parser import HTMLParser

import pytest
import vl_convert

from scheduling.simulator.charts import drawings
from scheduling.simulator.experiment import Experiment, Workload
from scheduling.simulator.figures import hours, microseconds, missed, percent, rows
from scheduling.simulator.measures import Service, measure
from scheduling.simulator.page import page
from scheduling.simulator.tiers import TierShares
from scheduling.simulator.traces import Trace
from scheduling.simulator.workload import Costs, Failures, FleetShape, TraceJob
from tests.scheduling.simulator.outcomes import outcome, small

POLICIES = [measure(small("ours")), measure(small("srtf", 1.5)), measure(outcome("empty"))]


@pytest.fixture(scope="module")
def report():
    trace = Trace([TraceJob("a", 0, 1, 1), TraceJob("b", 5, 1, 1)], files=["<b>&.csv"])
    work = Workload.of_trace(trace, TierShares.parse("20,40,40"), 0)
    return Experiment(work, FleetShape(2, 4), Costs(), Failures(), 0).report(POLICIES)


def test_every_row_has_a_cell_a_policy_and_every_cell_something():
    shown = list(rows(POLICIES))
    assert all(len(row.cells) in (0, 3) and all(row.cells) for row in shown)
    cells = {row.label.strip(): row.cells for row in shown}
    assert cells["allocated"] == ("80.0 %", "80.0 %", "–")
    assert cells["excused: failures"] == ("1", "1", "0")
    assert cells["5-8"] == ("0.01 h", "0.01 h", "–")


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (Service(0, 0), "–"),
        (Service(100, 0), "0 %"),
        (Service(100, 3, 3), "0 %"),  # all excused
        (Service(1000, 31), "3.10 %"),
        (Service(100_000, 1), "< 0.01 %"),  # not none
    ],
)
def test_share_of_missed_hours(of, text):
    assert missed(of) == text


def test_units():
    assert (percent(None), percent(0.981)) == ("–", "98.1 %")
    assert (hours(None), hours(5400)) == ("–", "1.50 h")
    assert (microseconds(None), microseconds(163.2), microseconds(2310)) == ("–", "163 µs", "2.31 ms")


def test_charts_are_drawn_by_vega_itself():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = list(drawings(POLICIES))
    assert [one.title for one in made] == [
        "Job-hours below level",
        "GPU fraction per tier",
        "Allocation over time",
        "Waiting time by job size",
        "Preemptions per job",
        "Latency of decisions",
    ]
    for one in made:
        drawing = vl_convert.vegalite_to_svg(one.spec)
        assert "srtf" in drawing and drawing.count("<path") > 5, one.title


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text, self.outside = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.outside += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        if self.tags and self.tags[-1] not in ("script", "style"):
            self.text.append(data)


def test_the_page_holds_all_it_needs(report):
    text = page(report)
    parsed = _Page()
    parsed.feed(text)
    assert parsed.outside == [] and "@import" not in text[:5_000]
    assert parsed.tags.count("figure") == 6 and parsed.tags.count("script") == 2
    words = " ".join(parsed.text)
    assert "Tiers are synthetic" in words and "<b>&.csv" in words and "2 nodes of 4 devices" in words
    assert "b" not in parsed.tags  # the name of a log is not markup
    assert re.search(r"0\.01 %|0 %", words)
    assert "vegaEmbed" in text and len(text) > 500_000


def test_a_policy_with_a_bad_name_cannot_leave_the_script(report):
    bad = [measure(small("</script><b>"))]
    parsed = _Page()
    parsed.feed(page(type(report)(report.settings, tuple(bad))))
    assert "b" not in parsed.tags
