"""Every test has an ERGO_HOME of its own, as in the end-to-end tests."""

from tests.end_to_end.conftest import home

__all__ = ["home"]
