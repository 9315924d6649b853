from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from proxy_runtime.node.joining import Joined


def test_a_call_that_is_repeated_meanwhile_is_joined_and_its_result_remembered() -> None:
    joined, calls, entered, release = Joined(), [], threading.Event(), threading.Event()

    def call() -> int:
        calls.append(1)
        entered.set()
        assert release.wait(10)
        return 7

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(joined.run, "key", call)
        assert entered.wait(10)
        others = [pool.submit(joined.run, "key", call) for _ in range(2)]
        release.set()
        assert [future.result(10) for future in (first, *others)] == [7, 7, 7]
    assert joined.run("key", call) == 7
    assert len(calls) == 1


def test_an_error_is_told_and_the_call_may_be_made_again() -> None:
    joined, entered, release = Joined(), threading.Event(), threading.Event()

    def fails() -> int:
        entered.set()
        assert release.wait(10)
        raise ValueError("once")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(joined.run, "key", fails)
        assert entered.wait(10)
        release.set()
        with pytest.raises(ValueError, match="once"):
            first.result(10)
    assert joined.run("key", lambda: 2) == 2


def test_what_is_forgotten_is_done_again() -> None:
    joined = Joined()
    assert joined.run(("a", 1), lambda: 1) == 1
    joined.forget(lambda key: key[0] == "a")
    assert joined.run(("a", 1), lambda: 2) == 2
