"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.infra.fixtures import kafka_broker, temporal_server  # noqa: F401  for every test below

# Two cores shared with others: a slow example is no finding. A failure prints how to reproduce itself.
settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("default")


@pytest.fixture(scope="session")
def golden() -> Path:
    """Files that must keep their meaning; see docs/compatibility.md."""
    return Path(__file__).parent / "golden"
