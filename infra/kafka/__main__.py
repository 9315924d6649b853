"""Brings the broker's jars if they are missing: `python -m infra.kafka`."""

from __future__ import annotations

import sys

from infra.kafka.install import jars
from proxy_runtime.errors import ErgoError

try:
    jars(print)
except ErgoError as error:
    sys.exit(str(error))
