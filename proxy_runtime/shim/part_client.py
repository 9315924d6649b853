"""Talking to the shim of a part: what a node agent does to a job on its node.

Every call connects anew, so that calls of several threads do not wait for each other, and an agent that has been
restarted needs nothing but the run directory. Every call is idempotent: repeated, it joins the one under way or
returns the same result.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import orjson

from model.codec import from_json, from_value, to_json
from model.ids import CheckpointId
from model.runtime import AttendResult, BarrierResult, CollectiveTarget, RestoreResult, RuntimeCode
from proxy_runtime.process import proc
from proxy_runtime.shim import frames, remains
from proxy_runtime.shim.client import connect, spawn
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.part import Endpoint, Limits, PartStatus, PartWritten
from proxy_runtime.shim.spec import RunError, RunSpec

MARGIN_S = 15.0  # beyond the deadline that the shim itself keeps
QUICK_S = 10.0


class PartClient:
    """One part's shim, found by its run directory. Has no state and need not be closed; thread-safe.

    Every method raises `RunError`: with the shim's own code and sentence; `run.shim-gone` where it has ended or was
    killed (everything it owned has ended with it); `runtime.deadline` where time ran out and the job runs on.
    """

    def __init__(self, layout: RunLayout, epoch: int | None = None) -> None:
        """`epoch` is needed where the shim has parts of several: without it, the newest one is meant."""
        self.layout = layout
        self._epoch = epoch

    @classmethod
    def spawn(cls, spec: RunSpec, build_root: Path, runs_dir: Path, *, limits: Limits | None = None) -> PartClient:
        """Starts the shim of a part in a session of its own, where none answers; it outlives this process.

        Its zygote begins to import torch at once, which takes seconds: a target of a migration is spawned (and
        prepared and connected) before the job is stopped.

        Args:
            spec: with `part` set. Its store (`checkpoint_dir`) must have the key of the tenant already.
            build_root: `Build.root` of the build to run with.
            runs_dir: the node's run directories; this one becomes `<runs_dir>/<job>-e<epoch>`.
            limits: of the watchdog.

        Raises:
            RunError: the shim ended at once; its log is quoted. The part has been here and its shim was killed
                (`run.shim-gone`): an epoch does not start twice.
        """
        if spec.part is None:
            raise RunError("the specification names no part of a job.", code="run.bad-spec")
        layout = RunLayout.of_part(runs_dir, spec.job_id, spec.part.epoch)
        client = cls(layout)
        if not client.alive:
            if layout.events.exists():
                raise RunError(
                    f"the shim of {layout.root.name} has been killed, and what it owned with it.",
                    code="run.shim-gone",
                    remedy="End the part; the job goes on in another epoch.",
                )
            spawn(layout, spec, build_root, limits=to_json(limits or Limits()).decode())
        return client

    # ------------------------------------------------------------------ bringing it up

    def prepare(self, host: str, *, fresh: bool, deadline_s: float = 60.0) -> tuple[Endpoint, ...]:
        """Forks the device proxies and picks TCP addresses for pairs with devices of other nodes.

        Args:
            host: address of this node, as the others reach it; the proxies listen on it.
            fresh: the job starts anew: mounts the job directory and launches the ranks, which wait at their first
                device call. Otherwise `restore` brings them.

        Returns:
            One endpoint for every pair whose lower index is here and whose higher one is not.
        """
        reply = self._call("prepare", deadline_s, host=host, fresh=fresh)
        return tuple(from_value(Endpoint, endpoint) for endpoint in reply["endpoints"])

    def connect(self, endpoints: Iterable[Endpoint], token: str, *, deadline_s: float = 60.0) -> None:
        """Connects the proxies to one another and to those of the other nodes; returns when all are connected.

        All nodes must be called within the deadline. After `prepare(fresh=True)` the job then runs; else `restore`
        follows (a load sends pending contributions, so the fabric must be there before). A failure is final for
        this epoch: `end` the part.

        Args:
            endpoints: of all nodes of the job; those of strangers do no harm.
            token: the secret of the job and epoch by which proxies know each other, at most 256 bytes.
        """
        wanted = [_plain(endpoint) for endpoint in endpoints]
        self._call("connect", deadline_s, endpoints=wanted, token=token)

    def restore(self, checkpoint: CheckpointId | str, *, deadline_s: float = 120.0) -> RestoreResult:
        """Makes the local ranks from a checkpoint of the node's own store; they are paused until `go`.

        Needs the volume and the parts of the local ranks in the store, nothing else. Counts of the local ranks are
        checked against each other; the caller compares them over all nodes.
        """
        return from_value(RestoreResult, self._call("restore", deadline_s, checkpoint=checkpoint)["result"])

    def go(self, *, deadline_s: float = 60.0) -> None:
        """Lets restored ranks run."""
        self._call("go", deadline_s)

    # ------------------------------------------------------------------ the next epoch, with the same processes

    def succeed(self, spec: RunSpec, before: int) -> None:
        """Has the shim of an earlier epoch serve this one too, on the same run directory.

        `prepare`, `connect` and `keep` follow; other parts of the job have to do the same at the same cut.

        Args:
            spec: of this epoch; it may have other ranks than `before`.
            before: the epoch that has the processes.
        """
        self._call("succeed", QUICK_S, spec=spec.to_json(), before=before)

    def keep(
        self, cut: int, checkpoint: CheckpointId | str | None = None, *, deadline_s: float = 60.0
    ) -> RestoreResult:
        """Gives the ranks of the epoch before, held at a finished cut, to the proxies of this one.

        With a `checkpoint`, of which all nodes have written what leaves them (``leaving``), those that come are
        restored from it, and the job's directory, in use as it is, becomes that of the checkpoint.

        They stand still until `go`, or until the epoch before is ended, from when on they are this one's. Where its
        cut is called off first, the job runs on there and this part can only be ended.
        """
        return from_value(RestoreResult, self._call("keep", deadline_s, cut=cut, checkpoint=checkpoint)["result"])

    # ------------------------------------------------------------------ a cut

    def stop_queues(
        self, cut: int, *, at_step: int | None = None, prefer_step_s: float = 0.0, deadline_s: float = 60.0
    ) -> BarrierResult:
        """Holds every queue at a message boundary and counts; see `model.runtime.BarrierInput`.

        A cut of a lower number that is still open is called off first. A cut that is over (resumed, called off by
        the watchdog, or older than the last one) is refused with `runtime.deadline`: begin the next one.
        """
        reply = self._call(
            "stop_queues",
            deadline_s + max(prefer_step_s, 0.0),
            cut=cut,
            at_step=at_step,
            prefer_step_s=prefer_step_s,
            phase_s=deadline_s,
        )
        return from_value(BarrierResult, reply["result"])

    def finish(
        self, cut: int, targets: Iterable[CollectiveTarget] | Mapping[str, int], *, deadline_s: float = 60.0
    ) -> BarrierResult:
        """Completes the collectives up to the targets over all nodes. Needs `stop_queues` of the cut."""
        named = targets if isinstance(targets, Mapping) else {t.communicator: t.collectives for t in targets}
        return from_value(BarrierResult, self._call("finish", deadline_s, cut=cut, targets=dict(named))["result"])

    def write(
        self,
        cut: int,
        kind: Literal["live", "full", "leaving", "final"],
        *,
        ranks: Iterable[int] = (),
        deadline_s: float = 120.0,
    ) -> PartWritten:
        """Writes this node's parts of a checkpoint into its store, without a manifest.

        Args:
            cut: finished; 0 for ``final``.
            kind: ``live``: the ranks go on as soon as they are dumped, while the rest is written. ``full``: they stay
                held until `resume` or `end`. ``leaving``: the same, but only `ranks` are written, and the volume; the
                others stand, for a part that will `keep` them. ``final``: the volume, after the ranks have ended.
            ranks: those that leave this node.
        """
        written = self._call("write", deadline_s, cut=cut, kind=kind, ranks=[*ranks])
        return from_value(PartWritten, written["result"])

    def resume(self, cut: int, *, deadline_s: float = 60.0) -> None:
        """Ends a cut or calls it off, at any time: the job runs on. Nothing happens where it runs already."""
        self._call("resume", deadline_s, cut=cut)

    # ------------------------------------------------------------------ looking at it

    @property
    def alive(self) -> bool:
        """Whether the shim answers."""
        try:
            connect(self.layout).close()
        except OSError:
            return False
        return True

    def status(self) -> PartStatus:
        """How the part is doing."""
        return from_value(PartStatus, self._call("status", QUICK_S)["status"])

    def wait(self, timeout_s: float) -> AttendResult | None:
        """The part's result as soon as its ranks have ended; None after `timeout_s` seconds."""
        found = self._call("wait", timeout_s, timeout_s=timeout_s)["result"]
        return None if found is None else from_value(AttendResult, found)

    def result(self) -> AttendResult | None:
        """The result as it is on disk: it is there even if the shim has been killed since."""
        try:
            return from_json(AttendResult, self.layout.result.read_bytes())
        except FileNotFoundError:
            return None

    def events(self) -> Iterator[dict[str, Any]]:
        """What has happened to the part so far and from now on, until its shim is gone."""
        with connect(self.layout) as connection:
            frames.send(connection, {"op": "watch"})
            while (event := frames.receive(connection)) is not None:
                yield event

    # ------------------------------------------------------------------ the end

    def end(self, grace_s: float = 0.0, *, deadline_s: float = 60.0) -> AttendResult | None:
        """Ends everything of the part, proves that no process is left, and removes its run directory.

        Nothing to end is success. A shim that does not answer is killed. Where it has a part of another epoch, which is
        not meant, it stays with that one's processes, and so does the directory.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL for the ranks; held ranks are killed at once.
            deadline_s: on top of `grace_s`.

        Returns:
            The part's result, if it is known.
        """
        pidfd = remains.shim_of(self.layout)
        result: AttendResult | None = None
        try:
            if pidfd >= 0:
                with suppress(RunError):  # ending just now, or hanging: then it is killed
                    reply = self._call("end", grace_s + deadline_s / 2, grace_s=grace_s)
                    found = reply["result"]
                    result = None if found is None else from_value(AttendResult, found)
                    if reply.get("stays"):  # not of a shim of before there were several parts
                        return result
                if not proc.wait_readable((pidfd,), deadline_s / 2):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            result = result or self.result()
            remains.require_gone(self.layout, time.monotonic() + deadline_s)
        finally:
            if pidfd >= 0:
                with suppress(ChildProcessError):  # whose parent is another process, or was: an agent that is gone
                    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
                os.close(pidfd)
        remains.remove(self.layout)
        return result

    # ------------------------------------------------------------------ helpers

    def _call(self, op: str, deadline_s: float, **arguments: Any) -> dict[str, Any]:
        try:
            with connect(self.layout) as connection:
                connection.settimeout(deadline_s + MARGIN_S)
                frames.send(connection, {"op": op, "epoch": self._epoch, "deadline_s": deadline_s, **arguments})
                reply = frames.receive(connection)
        except TimeoutError:
            raise RunError(
                f"the shim of {self.layout.root.name} did not answer '{op}' within {deadline_s:g} s.",
                code=RuntimeCode.DEADLINE,
            ) from None
        except OSError:
            reply = None
        if reply is None:
            raise RunError(
                f"the shim of {self.layout.root.name} has ended or was killed; everything it owned has ended with it.",
                code="run.shim-gone",
            )
        if not reply["ok"]:
            raise RunError(reply["error"], code=reply["code"], remedy=reply["remedy"])
        return reply


def _plain(value: object) -> Any:
    return orjson.loads(to_json(value))
