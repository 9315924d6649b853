"""Ends of jobs that nobody else can tell of, kept in the fleet's store until they are published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from model.codec import from_json, to_json
from model.control import JobNotice
from model.errors import ModelError
from model.shape import Shape
from proxy_runtime.errors import ErgoError
from proxy_runtime.storage.blobs import Bucket

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class End(Shape):
    """A job whose workflow was ended from outside: its last notice, and how, such as ``terminated``."""

    notice: JobNotice
    how: str


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of a cluster's jobs that are not published yet. Blocking; a killed process loses none.

    Attributes:
        publish: tells the world of one; it is repeated until it succeeds, and must take that.
    """

    bucket: Bucket
    cluster: str
    publish: Callable[[JobNotice, str], None]

    def add(self, notice: JobNotice, how: str) -> None:
        """Keeps an end, before the scheduler forgets the job.

        Raises:
            StorageError: the store does not answer.
        """
        self.bucket.put(f"{self._folder}/{notice.workflow_run}.json", to_json(End(notice, how)))

    def publish_all(self) -> None:
        """Publishes what is kept; what cannot be published stays for the next time.

        Raises:
            StorageError: the store does not answer.
        """
        for key in self.bucket.list(self._folder):
            data = self.bucket.get(key)
            if data is None:
                continue  # somebody else has published it
            try:
                end = from_json(End, data)
                self.publish(end.notice, end.how)
            except (ErgoError, ModelError) as error:
                _log.error("the end of a job is not published yet", key=key, error=str(error))
                continue
            self.bucket.delete(key)

    @property
    def _folder(self) -> str:
        return f"clusters/{self.cluster}/ends"
