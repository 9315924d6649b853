"""`ergo doctor` on what a local fleet needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.kafka import install
from infra.local.checks import checks


def test_this_machine_has_what_a_fleet_needs() -> None:
    assert [check.name for check in checks() if not check.ok] == []


def test_what_is_missing_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(install, "folder", lambda: tmp_path / "none")
    missing = {check.name: check for check in checks() if not check.ok}
    assert set(missing) == {"fleet: Java", "fleet: Kafka"}
    assert all("ERGO_KAFKA_BOOTSTRAP_SERVERS" in check.remedy for check in missing.values())
