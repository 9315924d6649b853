"""Sentences of the client about a workflow that does not answer as it should."""

from __future__ import annotations

from cli.fleet.client import _cannot_be_shown


def test_a_history_that_cannot_be_replayed_is_no_guess_about_versions():
    error = _cannot_be_shown("gpt", "[TMPRL1100] Nondeterminism error: Activity machine does not handle this event.")
    assert error.code == "fleet.replay"
    assert "does not come to what the job's history says" in str(error) and "can be replayed" not in str(error)
    assert "cannot be replayed) says what helps" in (error.remedy or "")


def test_another_error_of_a_query_is_told_as_it_is():
    error = _cannot_be_shown("gpt", "no such query.")
    assert str(error).startswith("Job gpt cannot be shown: no such query.") and error.code == "fleet.query"
