"""How ranks ended, and whose fault it was."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from model.runtime import RankExit
from proxy_runtime.errors import ErgoError
from proxy_runtime.shim import spec
from proxy_runtime.shim.generation import Generation
from proxy_runtime.shim.layout import EpochLayout

LAST_WORDS_BYTES = 4000

# What `Proxy::pump` and `Proxy::notice_lost_peers` (device/native/proxy.cpp) tell ranks whose peers are gone.
_LOST = ("device proxy is lost", "device proxies lost touch", "which keeps the rendezvous store, is gone")


def describe(layout: EpochLayout, rank: int, exit: spec.RankExit) -> RankExit:
    """The end of a rank with the end of its log."""
    words = last_words(layout.log(rank))
    if exit.signal:
        return RankExit(rank, signal=exit.signal, last_words=words)
    return RankExit(rank, exit_code=exit.code, last_words=words)


def last_words(log: Path) -> str:
    """The last lines of a log, whole ones."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LAST_WORDS_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    if size > LAST_WORDS_BYTES and "\n" in text:
        text = text.split("\n", 1)[1]
    return text.rstrip()


def lost_peer(generation: Generation) -> bool:
    """Whether ranks failed because a device proxy of another node is gone: then it is not the user's fault."""
    for proxy in generation.proxies.values():
        with suppress(ErgoError):
            report = proxy.stop(deadline_s=5.0)
            proxy.resume(deadline_s=5.0)
            failures = [str(rank.get("failure") or "") for rank in report["ranks"].values()]
            if any(words in failure for failure in failures for words in _LOST):
                return True
    return False


def sentence(exit: RankExit) -> str:
    """One line about an exit."""
    if exit.signal is not None:
        return f"rank {exit.rank} was killed by {spec.signal_name(exit.signal)}"
    return f"rank {exit.rank} exited with code {exit.exit_code}"
