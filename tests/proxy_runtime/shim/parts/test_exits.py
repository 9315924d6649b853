"""Last words are whole lines, from the end of a log of any size."""

from __future__ import annotations

from pathlib import Path

from proxy_runtime.shim import spec
from proxy_runtime.shim.layout import EpochLayout
from proxy_runtime.shim.parts import exits


def test_last_words_are_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert exits.last_words(log) == ""
    log.write_bytes(b"one\ntwo \xff\n\n")
    assert exits.last_words(log) == "one\ntwo \ufffd"
    log.write_text("".join(f"line {n}\n" for n in range(10_000)))
    words = exits.last_words(log)
    assert len(words) <= exits.LAST_WORDS_BYTES
    assert words.split("\n")[0].startswith("line ")
    assert words.endswith("line 9999")
    log.write_text("x" * 10_000)
    assert len(exits.last_words(log)) == exits.LAST_WORDS_BYTES


def test_an_exit_has_a_code_or_a_signal(tmp_path: Path) -> None:
    layout = EpochLayout(tmp_path, "job")
    layout.log(1).parent.mkdir(parents=True)
    layout.log(1).write_text("Error: no\n")
    failed = exits.describe(layout, 1, spec.RankExit(1, 3))
    killed = exits.describe(layout, 2, spec.RankExit(2, 137, 9))
    assert (failed.exit_code, failed.signal, failed.last_words) == (3, None, "Error: no")
    assert (killed.exit_code, killed.signal, killed.last_words) == (None, 9, "")
    assert exits.sentence(failed) == "rank 1 exited with code 3"
    assert exits.sentence(killed) == "rank 2 was killed by SIGKILL"
