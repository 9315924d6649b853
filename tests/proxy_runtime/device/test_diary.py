"""A proxy's lines are found by what docs/fleet.md greps for, as those of all other processes are."""

from __future__ import annotations

import json

from proxy_runtime.device.proxy import Diary


def test_a_line_names_its_job_as_other_logs_do(capfd):
    Diary({"job": "char-gpt-x7k2", "epoch": 3}).note("began", pid=1)
    line = capfd.readouterr().err
    assert '"job":"char-gpt-x7k2"' in line
    assert json.loads(line)["process"] == "device-proxy"
