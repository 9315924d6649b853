"""Whatever a few lines of a log say: the others mean what they meant, and only the reader's own error is raised."""

from __future__ import annotations

import gzip
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.errors import ModelError
from scheduling.simulator.formats import Columns
from scheduling.simulator.traces import Trace, read_traces

LINES = 12


@dataclass(frozen=True)
class Log:
    """A small log of a format. Its ids have no dot: what is put behind one that is there twice can be told."""

    header: str
    rows: tuple[str, ...]
    columns: Columns | None = None


LOGS = {
    "ITP": Log(
        "job_id,submission_time,duration,num_gpu",
        tuple(f"job-{n},{1_600_000_000 + n * 60},{n + 1},{n % 8 + 1}" for n in range(LINES)),
    ),
    "Chronus": Log(
        "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,expect_value_list,"
        "best_effort,job_type",
        tuple(f"{n},vc_{n % 3},{n % 4 + 1},{100 + n},5,m,{n + 1},5,1-2,1-1,0,soft" for n in range(LINES)),
    ),
    "Philly": Log(
        "timestamp,duration,num_gpus,gpu_time,cluster",
        tuple(f"2017-10-{n + 1:02} 07:01:55,{n + 1}.5,{n % 4 + 1},66.0,c{n % 2}" for n in range(LINES)),
    ),
    "own dates": Log(
        "name;team;class;queued;ran;gpus",
        tuple(f"j{n};red;Premium;2026-01-{n + 1:02}T00:00:00+01:00;1-00:00:0{n % 10};8" for n in range(LINES)),
        Columns("queued", "ran", "gpus", tenant="team", tier="class", id="name"),
    ),
    "own numbers": Log(
        "name|queued|ran|gpus",
        tuple(f'"j{n}"|{n * 0.5}|{n + 1}e1|2' for n in range(LINES)),
        Columns("queued", "ran", "gpus", id="name"),
    ),
}
# What somebody's export, editor or disk makes of a cell, and what our own words could stumble over.
CELLS = [
    "", " ", "0", "-1", "nan", "inf", "1e300", "-1e300", "1e-300", "1e999", "9" * 400, "9" * 5000,
    "0." + "0" * 400 + "1",
    "1970-01-01", "2999-12-31", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-02-30", "now", "null",
    "9" * 5000 + ":00:00", "9" * 5000 + "-1:00:00", "-1:00:00", "1:60:00", "٣", "１２", "1_000", "0x10", "1,5",
    '"', '""', '"1', "\0", "\x1b[31m", "\x85", "\u2028", "\ufeff", "x" * 200_000, "premium", "gold",
]  # fmt: skip


def written(log: Log, rows: list[bytes], zipped: bool, folder: str) -> Path:
    data = b"\n".join([log.header.encode(), *rows, b""])
    path = Path(folder) / ("log.csv.gz" if zipped else "log.csv")
    path.write_bytes(gzip.compress(data, 1) if zipped else data)
    return path


def figures(trace: Trace) -> list[tuple[object, ...]]:
    """The jobs without a beginning that depends on who else is there, and without the number behind an id."""
    return [(job.id.partition(".")[0], job.duration_s, job.devices, job.tenant, job.tier) for job in trace.jobs]


def times(trace: Trace, zero: float) -> list[float]:
    return [round(job.submit_s - zero, 3) for job in trace.jobs]


@st.composite
def mutations(draw, row: str, sign: str):
    """A line that is no longer what it was."""
    cells = row.split(sign)
    at = draw(st.integers(0, len(cells) - 1))
    kind = draw(st.sampled_from(["cell", "cell", "text", "bytes", "cut", "byte", "gone", "more"]))
    whole = row.encode()
    if kind == "cell":
        whole = sign.join([*cells[:at], draw(st.sampled_from(CELLS)), *cells[at + 1 :]]).encode()
    elif kind == "text":
        whole = draw(st.text(max_size=60)).encode(errors="surrogatepass")
    elif kind == "bytes":
        whole = draw(st.binary(max_size=60))
    elif kind == "cut":
        whole = whole[: draw(st.integers(0, len(whole)))]
    elif kind == "byte":
        place = draw(st.integers(0, len(whole) - 1))
        whole = whole[:place] + draw(st.binary(max_size=3)) + whole[place + draw(st.integers(0, 2)) :]
    elif kind == "gone":
        whole = sign.join([*cells[:at], *cells[at + 1 :]]).encode()
    else:
        whole += sign.encode() + draw(st.sampled_from(CELLS)).encode()
    return whole.replace(b"\n", b" ").replace(b"\r", b" ")


@pytest.mark.parametrize("name", LOGS)
@settings(max_examples=40)
@given(data=st.data(), zipped=st.booleans())
def test_a_damaged_line_changes_no_other(name, data, zipped):
    log = LOGS[name]
    sign = max(",;|", key=log.header.count)
    rows: list[bytes] = [row.encode() for row in log.rows]
    touched = data.draw(st.sets(st.integers(0, LINES - 1), max_size=2))
    for index in sorted(touched):
        rows[index] = data.draw(mutations(log.rows[index], sign))
    with tempfile.TemporaryDirectory() as folder:
        whole = read_traces([written(log, [row.encode() for row in log.rows], zipped, folder)], columns=log.columns)
        trace = read_traces([written(log, rows, zipped, folder)], columns=log.columns)
    assert len(whole.jobs) == LINES and not whole.damaged
    wanted = [index for index in range(LINES) if index not in touched]
    jobs, found = figures(whole), figures(trace)
    # Damaged lines are counted and told; blank ones are none.
    assert len(trace.jobs) + trace.damaged == trace.lines <= LINES
    assert len(trace.first_damaged) == trace.damaged and not trace.cut_off
    assert {damage.line - 2 for damage in trace.first_damaged} <= touched
    assert all(len(str(damage)) < 200 and str(damage).isprintable() for damage in trace.first_damaged)
    # All others are as they were, in the same distances.
    at = [found.index(jobs[index]) for index in wanted]
    zero = whole.jobs[wanted[0]].submit_s
    moved = times(trace, trace.jobs[at[0]].submit_s)
    assert [moved[place] for place in at] == [times(whole, zero)[index] for index in wanted]


@settings(max_examples=50)
@given(length=st.integers(0, 400))
@example(0)
@example(10)
def test_a_gzip_file_cut_anywhere_is_used_up_to_there(length):
    log = LOGS["ITP"]
    rows = [f"job-{number},{number},{number * 7919 % 997 + 1},1".encode() for number in range(200)]
    with tempfile.TemporaryDirectory() as folder:
        path = written(log, rows, True, folder)
        data = path.read_bytes()
        path.write_bytes(data[: min(length * len(data) // 400, len(data))])
        try:
            trace = read_traces([path])
        except ModelError as error:
            assert error.code in ("trace.unreadable", "trace.empty")
            return
    assert [job.id for job in trace.jobs] == [f"job-{number}" for number in range(len(trace.jobs))]
    assert trace.damaged == 0
    assert [end.line for end in trace.cut_off] == ([len(trace.jobs) + 1] if length < 400 else [])


@settings(max_examples=50)
@given(
    data=st.binary(max_size=300), head=st.sampled_from([b"", *(f"{log.header}\n".encode() for log in LOGS.values())])
)
def test_whatever_the_bytes_are_there_are_jobs_or_one_error(data, head):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.csv"
        path.write_bytes(head + data)
        for columns in {log.columns for log in LOGS.values()}:
            try:
                assert read_traces([path], columns=columns).jobs
            except ModelError as error:
                assert error.code.startswith("trace.") and str(error).rstrip().endswith((".", "?"))
