"""What the fuzzers have found before is decoded without a fault: the corpora, under the address sanitizer."""

from __future__ import annotations

import subprocess

import pytest

from tests.native.fuzz import TARGETS, Target


@pytest.mark.parametrize(
    # With torch's headers it takes a minute to build.
    "target",
    [pytest.param(target, id=target.name, marks=[pytest.mark.slow] if target.torch else []) for target in TARGETS],
)
def test_the_corpus_is_decoded_without_a_fault(target: Target) -> None:
    files = sorted(map(str, target.corpus.iterdir()))
    assert files
    command = [str(target.replay()), *files]
    done = subprocess.run(command, env=target.environment(), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"
