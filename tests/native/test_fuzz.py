"""What the fuzzer has found before is decoded without a fault: the corpus, under the address sanitizer."""

from __future__ import annotations

import subprocess

from tests.native.fuzz import CORPUS, replay


def test_the_corpus_is_decoded_without_a_fault() -> None:
    files = sorted(map(str, CORPUS.iterdir()))
    assert files
    done = subprocess.run([str(replay()), *files], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"
