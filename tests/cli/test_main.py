"""The command line as a whole: fast, complete, documented, and completed by shells."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from cli.reference import BEGIN, END, PAGE, page_with, reference
from tests.cli.conftest import DEADLINE_S, ROOT
from tests.cli.samples import NODE_1, node

COMMANDS = [
    "run", "doctor", "up", "down", "fleet", "submit", "ps", "show", "explain", "logs", "preempt", "resume",
    "checkpoint", "migrate", "cancel", "download", "events", "local", "simulate",
]  # fmt: skip


def python(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_imports_nothing_heavy():
    heavy = ["torch", "numpy", "temporalio", "obstore", "kafka", "httpx", "yaml", "proxy_runtime.job", "infra.settings"]
    assert python(f"import sys, cli.main; print([name for name in {heavy} if name in sys.modules])") == "[]\n"


def test_all_commands_are_there():
    text = reference()
    for name in COMMANDS:
        assert f"### `ergo {name}" in text
    assert "### `ergo local cut`" in text


def test_the_reference_is_that_of_the_commands():
    page = PAGE.read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    assert page == page_with(reference(), page), "run `python -m cli.reference`"


COMPLETE = "import sys; sys.argv = ['ergo']; from cli.main import main; main()"


async def complete(ergo, line):
    words = line.split(" ")
    env = {**ergo.env, "_ERGO_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        COMPLETE,
        cwd=ROOT,
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert err == b""
    return out.decode().split()


@pytest.mark.parametrize(("line", "words"), [("ergo submit --tier pr", ["premium"]), ("ergo mig", ["migrate"])])
async def test_completion(ergo, line, words):
    assert await complete(ergo, line) == words


async def test_completion_of_jobs_and_nodes(ergo, job, client, store):
    store.claim_node(node(NODE_1))
    handle = await job("zeta")
    async with asyncio.timeout(DEADLINE_S):
        while await complete(ergo, "ergo show ze") != [handle.id]:
            await asyncio.sleep(0.1)
    assert await complete(ergo, f"ergo migrate {handle.id} --to n") == ["node-1"]


async def test_completion_without_a_fleet_is_silent(ergo, plain_env):
    ergo.env = plain_env
    assert await complete(ergo, "ergo show x") == []
