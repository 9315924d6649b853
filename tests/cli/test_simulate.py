"""`ergo simulate`, from the command line to the figures."""

from __future__ import annotations

import gzip
import json

import pytest
from typer.testing import CliRunner

from cli.main import app
from model.errors import ModelError

LOG = "job_id,submission_time,duration,num_gpu\n" + "".join(
    f"job-{number},{number * 600},{1_800 + number % 7 * 900},{(1, 1, 2, 4, 8)[number % 5]}\n" for number in range(60)
)
FLEET = ["--nodes", "2", "--devices-per-node", "4"]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "cluster.csv.gz"
    path.write_bytes(gzip.compress(LOG.encode()))
    return str(path)


def ergo(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments])


def failed(*arguments):
    """The error that `main` turns into one sentence and exit code 1."""
    done = ergo(*arguments)
    assert isinstance(done.exception, ModelError), done.output
    return str(done.exception)


def test_all_policies_side_by_side(log, tmp_path):
    page = tmp_path / "page.html"
    done = ergo(log, *FLEET, "--html", str(page))
    assert done.exit_code == 0, done.output
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["ours", "fifo", "backfill", "las", "srtf", "restart"]
    ended = next(line for line in lines if line.startswith("  jobs that ended"))
    assert ended.split()[-6:] == ["60"] * 6
    assert "Tiers are synthetic" in done.stdout  # beside the figures, not on stderr
    assert "ours: 60 jobs in" in done.stderr
    assert page.read_text().count("<figure>") == 6


def test_json_is_the_same_again(log):
    def figures():
        done = ergo(log, *FLEET, "--json", "--policies", "srtf, ours", "--seed", "3", "--mtbf", "2", "--spot", "1")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    found, again = figures(), figures()
    assert [one["policy"] for one in found["policies"]] == ["srtf", "ours"]
    assert found["settings"]["failures"]["node_mtbf_s"] == 2 * 86_400
    assert found["settings"]["fleet"]["spot_nodes"] == 1
    timed = {"cpu_s", "policy_cpu_s", "decision_all_us", "decision_mean_us", "decision_p99_us", "decision_quantiles_us"}
    for one, other in zip(found["policies"], again["policies"], strict=True):
        assert {name: one[name] for name in one.keys() - timed} == {name: other[name] for name in other.keys() - timed}


def test_clusters_under_regions_and_a_fleet(log, tmp_path):
    other, page = tmp_path / "east.csv", tmp_path / "page.html"
    other.write_text(LOG.replace("job-", "e-"))
    clusters = ["--clusters", "1,2/2,1", "--devices-per-node", "8"]
    done = ergo(log, str(other), *clusters, "--lose", "region-1:2-4", "--html", str(page), "--load", "0.9")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0].split() == ["ours", "region", "fleet"]
    for told in ("Moves between clusters", "  by region-1", "lost for", "cluster-4", "lost: region-1 from 2 h to 4 h"):
        assert told in done.stdout
    assert "moves: a checkpoint is in another cluster after 60 s, in another region after 600 s" in done.stdout
    assert "Waiting time by cluster" in page.read_text() and "Moves between clusters" in page.read_text()
    done = ergo(log, str(other), "--clusters", "1,2", "--devices-per-node", "8", "--json", "--policies", "region,fifo")
    found = json.loads(done.stdout)
    assert [one["name"] for one in found["settings"]["clusters"]["members"]] == ["cluster", "east"]
    region, fifo = found["policies"]
    assert [one["jobs"] for one in region["clusters"]] == [60, 60] and region["ended"] == fifo["ended"] == 120
    assert [one["level"] for one in region["levels"]] == ["region-1"] and fifo["levels"] == []
    assert sum(one["moves"] for one in region["levels"]) == sum(jobs for _, _, jobs in region["moves_between_clusters"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nodes", "2", "--clusters", "1,1"], "either --nodes or --clusters"),
        (["--clusters", "1"], "two clusters or more"),
        (["--clusters", "1,1", "--spot", "2"], "no fewer than leased ones"),
        (["--nodes", "2", "--policies", "region"], "give --clusters"),
        (["--nodes", "2", "--lose", "fleet:1-2"], "Only with --clusters"),
        (["--clusters", "1,1", "--lose", "fleet:1-2"], "no level fleet"),
        (["--clusters", "1,1", "--lose", "region-1"], "hours from and to"),
        (["--clusters", "1,1", "--transfer-seconds", "5"], "two numbers"),
    ],
)
def test_wrong_usage_of_clusters(log, arguments, told):
    done = ergo(log, *arguments)
    assert done.exit_code == 2
    assert told in " ".join(done.stderr.replace("│", " ").split())


def test_ones_own_log_with_damaged_lines(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(
        "who,when,ran,cards,prio\nann,2026-01-01T00:00,30,2,premium\nbob,2026-01-01T00:05,30,1,basic\n"
        "cy,2026-01-01T00:06,30,-1,basic\ndan,2026-01-01T00:07,30,99,basic\n"
    )
    columns = "submit=when,duration=ran,devices=cards,tenant=who,tier=prio"
    done = ergo(str(path), *FLEET, "--columns", columns, "--time-unit", "min", "--policies", "fifo", "--json")
    assert done.exit_code == 0, done.output
    settings = json.loads(done.stdout)["settings"]
    assert (settings["jobs"], settings["damaged"], settings["too_large"]) == (3, 1, 1)
    assert settings["tiers"] == "Tiers are those of the trace."
    assert "1 line of 4 cannot be used" in done.stderr and "own.csv line 4: devices is -1" in done.stderr
    assert "1 job asked for more than the 8 devices" in done.stderr


def test_made_up_jobs(tmp_path):
    done = ergo("--synthetic", "llm", "--jobs", "80", "--load", "0.5", *FLEET, "--policies", "fifo", "--json")
    settings = json.loads(done.stdout)["settings"]
    assert settings["synthetic"] and settings["jobs"] == 80 and settings["load"] == pytest.approx(0.5)


def test_limit_and_load(log):
    done = ergo(log, *FLEET, "--limit", "20", "--load", "2", "--policies", "fifo", "--json")
    settings = json.loads(done.stdout)["settings"]
    assert settings["jobs"] == 20 and settings["load"] == pytest.approx(2.0)
    assert "2.00 times the device time" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "either job logs or --synthetic"),
        (["LOG", "--synthetic", "itp"], "either job logs or --synthetic"),
        (["LOG", "--policies", "ours,best"], "'best' is none of"),
        (["LOG", "--tiers", "1,2,3"], "make up 100"),
        (["LOG", "--columns", "submit=a"], "lacks duration and devices"),
        (["LOG", "--spot", "3"], "more than the 2"),
        (["LOG", "--html", "nowhere/page.html"], "no place for a file"),
        (["LOG", "--html", "/"], "no place for a file"),
        (["LOG", "--policies", "ours,fifo,ours"], "ours is there twice"),
        (["LOG", "LOG"], "is there twice"),
        (["LOG", "--resize-seconds", "inf"], "less than or equal to 86400"),
        (["LOG", "--load", "inf"], "less than or equal to 100"),
        (["LOG", "--load", "0"], "greater than or equal to 0.001"),
        (["LOG", "--load", "-1"], "greater than or equal to 0.001"),
        (["LOG", "--jobs", "5"], "--jobs: It goes with --synthetic only"),
        (["--synthetic", "itp", "--limit", "5"], "--limit: It goes with job logs only"),
        (["--synthetic", "itp", "--time-unit", "s"], "--time-unit: It goes with job logs only"),
        (["LOG", "--time-unit", "h"], "'h'"),
    ],
)
def test_wrong_usage(log, arguments, told):
    done = ergo(*(log if one == "LOG" else one for one in arguments), *FLEET)
    assert done.exit_code == 2
    assert told in " ".join(done.stderr.replace("│", " ").split())


def test_nodes_have_to_be_given(log):
    assert ergo(log).exit_code == 2


def test_a_log_that_was_cut_off_is_told_however_many_lines_are_damaged(tmp_path):
    path = tmp_path / "cut.csv.gz"
    head, *rows = LOG.splitlines(keepends=True)
    whole = gzip.compress((head + "bad,1,1,0\n" * 9 + "".join(rows)).encode())
    path.write_bytes(whole[: len(whole) - 60])
    done = ergo(str(path), *FLEET, "--policies", "fifo", "--json")
    assert done.exit_code == 0, done.output
    settings = json.loads(done.stdout)["settings"]
    assert settings["cut_off"] == ["cut.csv.gz"] and settings["damaged"] == 9
    assert f"line {settings['lines'] + 1}: nothing after it can be read" in done.stderr
    assert "cut off: cut.csv.gz" in ergo(str(path), *FLEET, "--policies", "fifo").stdout


def test_a_run_in_which_failures_undo_everything_ends(log):
    done = ergo(log, *FLEET, "--policies", "las", "--mtbf", "0.001", "--json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["policies"]
    assert found["ended"] < found["jobs"] == 60
    assert f"{60 - found['ended']} of 60 jobs have not ended: for a week, none got any further" in done.stderr


def test_figures_are_shown_even_if_the_page_cannot_be_written(log):
    done = ergo(log, *FLEET, "--policies", "fifo", "--html", "/proc/page.html")
    assert isinstance(done.exception, ModelError) and "cannot be written" in str(done.exception)
    assert "jobs that ended" in done.stdout


def test_what_cannot_be_simulated_is_one_sentence(log, tmp_path):
    assert "cannot be read" in failed(str(tmp_path / "none.csv"), *FLEET)
    assert "no column a" in failed(log, *FLEET, "--columns", "submit=a,duration=duration,devices=num_gpu")
    huge = tmp_path / "huge.csv"
    huge.write_text("job_id,submission_time,duration,num_gpu\na,1,1,64\n")
    assert "No job of the log fits" in failed(str(huge), *FLEET)
