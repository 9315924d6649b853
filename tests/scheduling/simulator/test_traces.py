"""Job logs of known formats and of anybody's own; damaged ones."""

from __future__ import annotations

import gzip
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from model.errors import ModelError
from model.job_spec import Tier
from scheduling.simulator.formats import Columns, TimeUnit
from scheduling.simulator.traces import FIRST_SHOWN, read_traces

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"
ITP = "job_id,submission_time,duration,num_gpu\n"
OWN = Columns("queued", "ran", "gpus", tenant="team", tier="class", id="name")
OWN_HEADER = "name,team,class,queued,ran,gpus\n"


@pytest.fixture
def log(tmp_path):
    def write(text, name="log.csv"):
        path = tmp_path / name
        data = text if isinstance(text, bytes) else text.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


def brief(trace):
    return [(job.id, job.submit_s, job.duration_s, job.devices, job.tenant, job.tier) for job in trace.jobs]


@pytest.mark.parametrize("name", ["cluster.csv", "cluster.csv.gz"])
def test_itp(log, name):
    trace = read_traces([log(ITP + "b,70,20,8\na,10,5,1\n", name)])
    assert brief(trace) == [("a", 0, 5, 1, "default", None), ("b", 60, 20, 8, "default", None)]
    assert (trace.files, trace.formats, trace.lines, trace.damaged) == ([name], ["ITP"], 2, 0)


def test_chronus_counts_minutes_and_has_tiers(log):
    header = "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,"
    text = header + (
        "expect_value_list,best_effort,job_type\n"
        "0,vc_a,1,100,5,m,96,5,159-189,10-8,0,soft\n1,vc_b,2,101,5,m,2,5,1,1,0,strict\n2,vc_b,4,99,5,m,3,5,1,1,1,best\n"
    )
    assert brief(read_traces([log(text)])) == [
        ("2", 0, 180, 4, "vc_b", Tier.BASIC),
        ("0", 60, 5760, 1, "vc_a", Tier.STANDARD),
        ("1", 120, 120, 2, "vc_b", Tier.PREMIUM),
    ]


def test_philly_has_dates(log):
    text = (
        "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,1,66.0,11cb48\n"
        "2017-10-09 06:13:03,2951.0,8,1.0,6214e9\n"
    )
    assert brief(read_traces([log(text, "philly.csv")])) == [
        ("philly-3", 0, 2951, 8, "6214e9", None),
        ("philly-2", 2932, 66, 1, "11cb48", None),
    ]


@pytest.mark.parametrize(
    ("queued", "ran", "unit", "seconds"),
    [
        (("1000", "3000"), "500", "s", (2000, 500)),
        (("1000", "3000"), "500", "min", (120_000, 30_000)),
        (("1767225600000", "1767225601500"), "2500", "ms", (1.5, 2.5)),
        (("1e3", "1.5e3"), "2.5", "s", (500, 2.5)),
        (("2026-01-01T00:00:00Z", "2026-01-01T02:00:00+01:00"), "60", None, (3600, 60)),
        (("2026-01-01 00:00:00.25", "2026-01-01"), "1-02:03:04", None, (-0.25, 93_784)),
    ],
)
def test_times_of_ones_own_log(log, queued, ran, unit, seconds):
    text = OWN_HEADER + "".join(f"j{index},red,premium,{when},{ran},1\n" for index, when in enumerate(queued))
    trace = read_traces([log(text)], columns=OWN, unit=unit and TimeUnit(unit))
    at = {job.id: job for job in trace.jobs}
    assert at["j1"].submit_s - at["j0"].submit_s == pytest.approx(seconds[0])
    assert at["j0"].duration_s == pytest.approx(seconds[1])
    assert trace.formats == ["CSV"] and {job.tier for job in trace.jobs} == {Tier.PREMIUM}


@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
def test_any_usual_delimiter_quotes_and_line_end(log, sign):
    rows = [["name", "team", "class", "queued", "ran", "gpus"], ["a", f'"x{sign}y"', "Basic", "1", "2", "3"]]
    text = "\ufeff" + "".join(sign.join(row) + "\r\n" for row in rows)
    assert brief(read_traces([log(text)], columns=OWN)) == [("a", 0, 2, 3, f"x{sign}y", Tier.BASIC)]


def test_a_list_of_slurm_s(log):
    text = (
        "JobID|Submit|Elapsed|Account|AllocTRES\n71|2026-01-01T00:00:00|1-00:00:05|ml|8\n"
        "72|2026-01-01T00:00:09|00:10:00|ml|billing=4,cpu=4,mem=8G,node=1\n"
    )
    columns = Columns("Submit", "Elapsed", "AllocTRES", tenant="Account", id="JobID")
    trace = read_traces([log(text)], columns=columns)
    assert brief(trace) == [("71", 0, 86_405, 8, "ml", None)] and trace.damaged == 1  # the other one took no GPU


def test_optional_columns_may_be_left_out_and_cells_empty(log):
    columns = Columns.parse("devices = gpus, submit=queued ,duration=ran")
    trace = read_traces([log(OWN_HEADER + ",,,5,1,2\n\n,,,6,1,2\n")], columns=columns)
    assert brief(trace) == [("log-2", 0, 1, 2, "default", None), ("log-4", 1, 1, 2, "default", None)]


DAMAGED = {
    "a,t,,1,1,-3": "devices is -3",
    "b,t,,1,1,0": "devices is 0",
    "c,t,,1,1,2000000": "devices is 2000000",
    "d,t,,1,1,0.5": "a fraction",
    "e,t,,1,1,many": "'many', which is no number",
    "f,t,,1,0,1": "never ran",
    "g,t,,1,-5,1": "never ran",
    "h,t,,1,1e9,1": "absurd",
    "i,t,,1,,1": "duration is empty",
    "j,t,,1,nan,1": "'nan'",
    "k,t,,-1,1,1": "no time",
    "l,t,,yesterday,1,1": "neither a number nor an ISO 8601 time",
    "m,t,,1e400,1,1": "no time",
    "n,t,gold,1,1,1": "tier is 'gold', which is none of premium, standard, basic",
    "o,t,,1": "it has 4 cells, the header 6",
    "p,t,,1,1,1,7": "it has 7 cells, the header 6",
    'q,"t,,1,1,1': "it has 2 cells",
    "r,t,,1,1,\0": "no number",
}


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_is_told_and_the_rest_is_used(log, line):
    trace = read_traces([log(f"{OWN_HEADER}good,t,,7,1,1\n{line}\nlast,t,,9,1,1,\n")], columns=OWN)
    assert [job.id for job in trace.jobs] == ["good", "last"]
    assert trace.damaged == 1 and trace.lines == 3
    told = str(trace.first_damaged[0])
    assert told.startswith("log.csv line 3: ") and DAMAGED[line] in told


@pytest.mark.parametrize(
    ("stray", "told"),
    [
        ("1970-01-01", "56 years from"),
        ("2999-12-31T00:00", "974 years from"),
        ("0001-01-01T00:00:00+14:00", "2,025 years"),
        ("9999-12-31T23:59:59-14:00", "7,974 years"),
        ("17", "is one of numbers, unlike those of most lines"),
        ("1e300", "is one of numbers"),
    ],
)
def test_a_stray_date_is_a_damaged_line(log, stray, told):
    rows = [f"j{day},t,,2026-01-{day:02},1,1" for day in range(1, 9)]
    rows.insert(3, f"j8,t,,{stray},1,1")
    rows.insert(2, "bad,t,,,1,1")
    trace = read_traces([log(OWN_HEADER + "\n".join(rows))], columns=OWN)
    # One that is left out takes no other job's id.
    assert [(job.id, job.submit_s) for job in trace.jobs] == [(f"j{day}", (day - 1) * 86_400) for day in range(1, 9)]
    assert trace.damaged == 2 and [damage.line for damage in trace.first_damaged] == [4, 6]
    assert told in str(trace.first_damaged[1])


@pytest.mark.parametrize(
    ("stray", "told"), [("2026-01-01", "is one of dates"), ("1e300", "e+292 years"), ("0", "54 years")]
)
def test_a_stray_number_is_a_damaged_line(log, stray, told):
    rows = [f"{number},{when},1,1" for number, when in enumerate([1_700_000_000, stray, 1_700_000_900])]
    trace = read_traces([log(ITP + "\n".join(rows))])
    assert [(job.id, job.submit_s) for job in trace.jobs] == [("0", 0), ("2", 900)]
    assert trace.damaged == 1 and told in str(trace.first_damaged[0])


def test_many_strays_are_refused_and_none_dropped_in_silence(log):
    code, text = refused(log(ITP + "".join(f"a,{when},1,1\n" for when in (1, 2, 3, 1_700_000_000, 1_700_000_009))))
    assert code == "trace.clock" and "line 4 to the next, of log.csv line 5, it is 54 years" in text


def test_files_of_two_clocks_are_refused_whichever_is_longer(log):
    dates = log(OWN_HEADER + "".join(f"a,,,2026-01-{day},1,1\n" for day in range(10, 30)), "dates.csv")
    code, text = refused(dates, log(OWN_HEADER + "b,,,1,1,1\n", "numbers.csv"), columns=OWN)
    assert code == "trace.clock" and "dates.csv line 2" in text and "numbers.csv line 2" in text


def test_only_the_first_damaged_lines_are_kept(log):
    trace = read_traces([log(ITP + "a,1,1,1\n" + "x,1,1,0\n" * 100)])
    assert trace.damaged == 100 and len(trace.first_damaged) == FIRST_SHOWN


def test_bytes_that_are_no_text_damage_nothing_else(log):
    trace = read_traces([log(ITP.encode() + b"\xff\xfe,1,1,1\nb,2,1,\xff\nc,3,1,1\n")])
    assert trace.damaged == 1 and [job.devices for job in trace.jobs] == [1, 1]


def test_a_file_that_was_cut_off_is_used_up_to_there(log):
    rows = "".join(f"job-{number * 7919 % 10007},{number},{number % 97 + 1},1\n" for number in range(20_000))
    whole = gzip.compress((ITP + rows).encode())
    path = log(whole[: len(whole) // 2], "cut.csv")
    trace = read_traces([path])
    assert 1_000 < len(trace.jobs) < 19_000
    (end,) = trace.cut_off
    assert len(trace.jobs) == end.line - 1 and trace.damaged == 0
    assert str(end) == f"cut.csv line {end.line}: nothing after it can be read (the file ends in the middle)"


def test_ids_that_occur_again_get_a_number(log):
    first, second = log(ITP + "a,1,1,1\na,2,1,1\na.2,3,1,1\n", "x.csv"), log(ITP + "a,4,1,1\n", "y.csv")
    trace = read_traces([first, second])
    assert [job.id for job in trace.jobs] == ["a", "a.2", "a.2.2", "a.3"] and trace.renamed == 3


def test_files_share_a_clock_and_the_first_jobs_are_taken(log):
    late, early = log(ITP + "c,100,1,1\n", "late.csv"), log(ITP + "b,60,1,1\na,50,1,1\n", "early.csv")
    trace = read_traces([late, early], limit=2)
    assert [(job.id, job.submit_s) for job in trace.jobs] == [("a", 0), ("b", 10)]


def test_a_pipe_is_read_too(log, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(gzip.compress((ITP + "a,1,1,1\n").encode())))
    writer.start()
    assert len(read_traces([pipe]).jobs) == 1
    writer.join()


def refused(*paths, **options):
    with pytest.raises(ModelError) as caught:
        read_traces(list(paths), **options)
    return caught.value.code, str(caught.value)


def test_what_cannot_be_read_is_one_sentence(log, tmp_path):
    assert refused(tmp_path / "no.csv")[0] == "trace.unreadable"
    assert "directory" in refused(tmp_path)[1]
    assert refused(log(""))[0] == "trace.empty"
    assert "zip file" in refused(log(b"PK\x03\x04abc"))[1]
    assert "not text" in refused(log(b"\x00\x01\x02"))[1]
    assert refused(log(b"\x1f\x8bnonsense"))[0] == "trace.unreadable"
    assert "not text" in refused(log(b"\x00\x01\x02", "binary.gz"))[1]
    assert "There is no job in log.csv" in refused(log(ITP))[1]
    code, text = refused(log(ITP + "a,1,1,0\n"))
    assert code == "trace.empty" and "None of the 1 lines" in text and "line 2: devices is 0" in text


def test_columns_that_are_not_there_are_named_with_those_that_are(log):
    code, text = refused(log("when,took,gpus\n1,1,1\n"))
    assert code == "trace.columns" and "when, took, gpus" in text and "--columns" in text
    code, text = refused(log("when,took,gpus\n1,1,1\n"), columns=Columns("when", "length", "cards"))
    assert code == "trace.columns" and "no column length nor cards" in text and "when, took, gpus" in text
    code, text = refused(log("when,when,gpus\n1,1,1\n"), columns=Columns("when", "took", "gpus"))
    assert code == "trace.columns" and "the column when more than once" in text


def test_the_names_of_columns_are_a_header_of_their_own(log):
    (job,) = read_traces([log("submit,duration,devices\n0,60,2\n")]).jobs
    assert (job.duration_s, job.devices, job.tenant, job.tier) == (60.0, 2, "default", None)
    trace = read_traces([log("id,tier,devices,note,tenant,duration,submit\na,premium,2,x,acme,60,0\n")])
    assert trace.formats == ["CSV"]
    (job,) = trace.jobs
    assert (job.id, job.tier, job.tenant, job.duration_s, job.devices) == ("a", Tier.PREMIUM, "acme", 60.0, 2)
    assert "more than once" in refused(log("submit,submit,duration,devices\n0,0,1,1\n"))[1]


@pytest.mark.parametrize(
    ("header", "example"),
    [
        ("when,took,gpus", "submit=when,duration=took,devices=gpus"),
        ("submit,runtime,devices", "submit=submit,duration=runtime,devices=devices"),
        ("a,b,c,d", "submit=a,duration=b,devices=c"),
    ],
)
def test_the_advice_names_columns_that_are_there(log, header, example):
    assert f"--columns {example}." in refused(log(header + "\n" + ",".join("1" * len(header.split(","))) + "\n"))[1]
    assert "--columns" not in refused(log("a,b\n1,1\n"))[1]


def test_clocks_that_do_not_go_together(log):
    code, text = refused(log(OWN_HEADER + "a,,,1,1,1\nb,,,2026-01-01,1,1\n"), columns=OWN)
    assert code == "trace.clock" and "line 2" in text and "line 3" in text
    dates = OWN_HEADER + "a,,,1997-01-01,1,1\nb,,,2026-01-01,1,1\n"
    code, text = refused(log(dates), columns=OWN)
    assert code == "trace.clock" and "line 2 to the next, of log.csv line 3, it is 29 years" in text
    assert "--time-unit" not in text and "Correct the dates" in text
    code, text = refused(log(OWN_HEADER + "a,,,1700000000000,1,1\nb,,,1705000000000,1,1\n"), columns=OWN)
    assert code == "trace.clock" and "--time-unit" in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("submit=a,duration=b", "lacks devices"),
        ("submit=a,duration=b,devices", "'devices', which is not NAME=COLUMN"),
        ("submit=a,duration=b,device=c", "Is devices meant?"),
        ("submit=a,submit=b,duration=b,devices=c", "twice"),
        ("submit=a,duration=a,devices=c", "from one column"),
        ("", "not NAME=COLUMN"),
    ],
)
def test_columns_option(text, told):
    with pytest.raises(ModelError, match="--columns") as caught:
        Columns.parse(text)
    assert told in str(caught.value)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not here")
def test_the_shared_traces():
    clusters = sorted((TRACES / "itp-2021").glob("*.csv.gz"))
    trace = read_traces(clusters)
    assert (len(trace.jobs), trace.damaged, trace.renamed) == (32_211, 0, 0)
    assert timedelta(days=59) < timedelta(seconds=trace.jobs[-1].submit_s) < timedelta(days=61)
    mix = read_traces([TRACES / "chronus-philly-slo" / "mix2.csv.gz"])
    assert len(mix.jobs) + mix.damaged == 30_940 and mix.damaged == 194  # these took no device
    assert len({job.tenant for job in mix.jobs}) == 11
