"""Logs of every process: JSON lines on stderr, one record each, the job's id on all that is about one.

`structlog.contextvars.bind_contextvars(job=…, epoch=…, node=…)` puts ids on every line of a task from then on,
those of the standard library's and of Temporal's loggers included.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any

import orjson
import structlog
from structlog.typing import Processor

# What `workflow.logger` and `activity.logger` put on a record, by our words.
_TEMPORAL_IDS = {"workflow_id": "workflow", "workflow_run_id": "workflow_run", "run_id": "workflow_run"}


def configure(process: str, *, level: str | None = None) -> None:
    """Routes structlog, `logging` and temporalio into JSON lines on stderr.

    Args:
        process: what this process is, e.g. ``node-agent``; on every line.
        level: the lowest that is written; by default `$ERGO_LOG_LEVEL`, else ``INFO``.
    """
    lowest = (level or os.environ.get("ERGO_LOG_LEVEL") or "INFO").upper()
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        _temporal_ids,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _process_adder(process),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(lowest if lowest in logging.getLevelNamesMapping() else "INFO")
    # Errors of Kafka come to us as exceptions and are told in a sentence; its client tells them ten times a second.
    logging.getLogger("kafka").setLevel(max(logging.CRITICAL, root.level))
    for chatty in ("httpx", "httpcore", "uvicorn.access", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)


def _process_adder(process: str) -> Processor:
    def add(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("process", process)
        return event

    return add


def _temporal_ids(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Flattens what temporalio's adapters say of a workflow or an activity; a job's workflow id is the job's id."""
    for key in ("temporal_workflow", "temporal_activity"):
        found = event.pop(key, None)
        if not isinstance(found, dict):
            continue
        for name, ours in _TEMPORAL_IDS.items():
            if name in found:
                event.setdefault(ours, found[name])
        if found.get("workflow_type") == "Job" and "workflow_id" in found:
            event.setdefault("job", found["workflow_id"])
        if "activity_type" in found:
            event.setdefault("activity", found["activity_type"])
            event.setdefault("attempt", found.get("attempt"))
    return event


def _render(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> str:
    for key in ("_record", "_from_structlog"):
        event.pop(key, None)
    line = {"time": event.pop("time", ""), "level": event.pop("level", ""), "event": event.pop("event", ""), **event}
    return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
