"""Sizes as people read them; how they are written is tested with a job's specification."""

from __future__ import annotations

import pytest

from model.units import size_words


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")])
def test_sizes(count, text):
    assert size_words(count) == text
