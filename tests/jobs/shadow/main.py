"""A script with modules of its own that have the names of Ergosphere's packages, and its own sitecustomize.

Run it with ``PYTHONPATH=tests/jobs/shadow/site``; it fails if anybody else's module was imported instead.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch

import cli
import events
import model

HERE = Path(__file__).resolve().parent
FOREIGN = ["cli", "events", "model", "proxy_runtime", "workflows", "activities", "scheduling", "infra"]


def main() -> None:
    for module in (cli, events, model):
        assert Path(module.__file__ or "").parent == HERE, f"{module.__name__} came from {module.__file__}"
        assert module.__name__ == module.MINE
    site = os.environ.get("SHADOW_SITECUSTOMIZE")
    assert site == "ran", "the user's sitecustomize did not run"
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        for name in FOREIGN:
            assert not Path(entry, name).exists(), f"what was injected makes {name} importable"
    assert "ERGO_CHANNEL" not in os.environ
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    total = torch.arange(10.0, device=device).sum().item()
    assert total == 45.0, total
    assert sys.argv[1:] == ["--flag", "a b"], sys.argv
    print(f"RESULT {hashlib.sha256(b'shadow').hexdigest()} rank {os.environ.get('RANK', '0')}")


if __name__ == "__main__":
    main()
