"""CRIU's RPC: its messages, and one session with `criu swrk` inside a container.

The messages are built at import from the table below; names and numbers are those of CRIU's `rpc.proto`
and `stats.proto`, of which only the fields used here are listed.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from proxy_runtime.process import proc
from proxy_runtime.process.namespace import Container
from proxy_runtime.process.spawn import Start, spawn

_Field = descriptor_pb2.FieldDescriptorProto


class RequestType(IntEnum):
    """`criu_req_type`."""

    EMPTY = 0
    DUMP = 1
    RESTORE = 2
    CHECK = 3
    NOTIFY = 6
    VERSION = 10


class CgroupMode(IntEnum):
    """`criu_cg_mode`. IGNORE: what is restored stays in the control group of the container's pid 1."""

    IGNORE = 0


# message -> field -> (number, kind, required)
_MESSAGES: Final[dict[str, dict[str, tuple[int, str, bool]]]] = {
    "criu_opts": {
        "images_dir_fd": (1, "int32", True),
        "pid": (2, "int32", False),
        "leave_running": (3, "bool", False),
        "file_locks": (8, "bool", False),
        "log_level": (9, "int32", False),
        "log_file": (10, "string", False),
        "notify_scripts": (12, "bool", False),
        "link_remap": (18, "bool", False),
        "manage_cgroups": (24, "bool", False),
        "manage_cgroups_mode": (34, "int32", False),  # an enum: same encoding
        "ghost_limit": (35, "uint32", False),
        "timeout": (45, "uint32", False),
        "tcp_close": (52, "bool", False),
        "images_dir": (68, "string", False),
    },
    "criu_notify": {"script": (1, "string", False), "pid": (2, "int32", False)},
    "criu_restore_resp": {"pid": (1, "int32", True)},
    "criu_version": {
        "major_number": (1, "int32", True),
        "minor_number": (2, "int32", True),
        "sublevel": (4, "int32", False),
    },
    "criu_req": {
        "type": (1, "int32", True),
        "opts": (2, "criu_opts", False),
        "notify_success": (3, "bool", False),
    },
    "criu_resp": {
        "type": (1, "int32", True),
        "success": (2, "bool", True),
        "restore": (4, "criu_restore_resp", False),
        "notify": (5, "criu_notify", False),
        "cr_errno": (7, "int32", False),
        "cr_errmsg": (9, "string", False),
        "version": (10, "criu_version", False),
    },
    "dump_stats_entry": {
        "freezing_time": (1, "uint32", True),
        "frozen_time": (2, "uint32", True),
        "memdump_time": (3, "uint32", True),
        "memwrite_time": (4, "uint32", True),
        "pages_written": (7, "uint64", True),
    },
    "stats_entry": {"dump": (1, "dump_stats_entry", False)},
}
_KINDS: Final = {
    "int32": _Field.TYPE_INT32,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
}
_PACKAGE: Final = "ergosphere.criu"
_MAX_MESSAGE: Final = 1 << 16


def _build_messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="ergosphere/criu.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind, required) in fields.items():
            field = message.field.add(name=field_name, number=number)
            field.label = _Field.LABEL_REQUIRED if required else _Field.LABEL_OPTIONAL
            if kind in _KINDS:
                field.type = _KINDS[kind]
            else:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()  # of our own: another library may know CRIU's messages by their names
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_messages = _build_messages()
Request: Any = _messages["criu_req"]
Response: Any = _messages["criu_resp"]
_Stats: Any = _messages["stats_entry"]


class SessionLostError(Exception):
    """CRIU ended or could not be started: the text says which."""


class SessionTimeoutError(Exception):
    """CRIU did not answer in time."""


class Session:
    """One `criu swrk`, in the pid, mount and network namespaces of a container. Ends with the `with` block.

    Args:
        criu_path: the program.
        container: where it runs.
        deadline_s: seconds for all calls, hooks not counted.
        grace_s: how much longer a late CRIU may take to undo what it has done.
        no_aslr: address space randomization is off in what it restores and in all that this starts later: CRIU does
            not keep that of the processes it has dumped, and they have its own.

    Attributes:
        criu_pid: host pid of CRIU itself.
    """

    def __init__(
        self,
        criu_path: Path | str,
        container: Container,
        deadline_s: float,
        *,
        grace_s: float = 0.0,
        no_aslr: bool = False,
    ) -> None:
        self._limit = time.monotonic() + deadline_s
        self._grace_s = grace_s
        self._pidfd = -1
        self.criu_pid = 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        argv = [str(container.init_binary), "--parent", str(os.getpid()), "--enter", str(container.init_pid)]
        if container.network != "host":
            argv.append("--net-too")
        if no_aslr:
            argv.append("--no-aslr")
        try:
            with theirs:
                argv += ["--", str(criu_path), "swrk", str(theirs.fileno())]
                # What is in the launcher's environment (LD_PRELOAD, CRIU_*) is none of CRIU's business.
                env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
                self._process = spawn(Start(argv, env, (theirs.fileno(),), stdout_fd=write_end))
            os.close(write_end)
            write_end = -1
            self._read_pid(read_end)
        except BaseException:
            self.__exit__()
            raise
        finally:
            os.close(read_end)
            if write_end >= 0:
                os.close(write_end)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        """Lets CRIU end by itself, for at most 5 seconds, then kills it."""
        self._socket.close()
        process = getattr(self, "_process", None)
        if process is None:
            return
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.kill()
            process.kill()
            process.wait()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def kill(self) -> None:
        """Kills CRIU.

        Tasks that it has stopped go on: the kernel detaches them, and its parasite code then leaves them. But for
        a few moments, while that code is put in or taken out, a task that loses its tracer dies of SIGTRAP.
        """
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def call(self, request: Any, on_notify: Callable[[str, int], None] | None = None) -> Any:
        """Sends a request and returns CRIU's answer.

        `on_notify(script, pid)` is called at each of CRIU's stages; the time that it takes does not count.
        When it raises, CRIU is told that the stage failed, and the exception goes on after CRIU's answer.
        At the first stage after the deadline CRIU is told the same.

        Raises:
            SessionLostError: CRIU ended without an answer.
            SessionTimeoutError: the deadline passed.
        """
        failure: BaseException | None = None
        self._send(request)
        while True:
            response = Response.FromString(self._receive(failure))
            if response.type != RequestType.NOTIFY:
                if failure is not None:
                    raise failure
                return response
            if failure is None and time.monotonic() > self._limit:
                failure = SessionTimeoutError()
            if on_notify is not None and failure is None:
                started = time.monotonic()
                try:
                    on_notify(response.notify.script, response.notify.pid)
                except BaseException as error:  # raised again below
                    failure = error
                self._limit += time.monotonic() - started
            self._send(Request(type=RequestType.NOTIFY, notify_success=failure is None))

    def _send(self, request: Any) -> None:
        try:
            self._socket.send(request.SerializeToString())
        except OSError as error:
            raise SessionLostError(f"CRIU ended early ({error.strerror})") from error

    def _receive(self, failure: BaseException | None) -> bytes:
        left = self._limit + self._grace_s - time.monotonic()
        # A child of a killed CRIU may keep the socket open: its own end counts too.
        if left <= 0 or not proc.wait_readable((self._socket.fileno(), self._pidfd), left):
            raise failure or SessionTimeoutError
        try:
            data = self._socket.recv(_MAX_MESSAGE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            data = b""
        except OSError as error:
            raise SessionLostError(f"CRIU ended early ({error.strerror})") from error
        if not data:
            raise failure or SessionLostError("CRIU ended without an answer")
        return data

    def _read_pid(self, read_end: int) -> None:
        left = self._limit - time.monotonic()
        if left <= 0 or not proc.wait_readable((read_end,), left):
            raise SessionTimeoutError
        text = os.read(read_end, 64)
        if not text.strip().isdigit():
            raise SessionLostError(
                f"CRIU could not be started in the container: {text.decode(errors='replace').strip()}"
            )
        self.criu_pid = int(text)
        try:
            self._pidfd = os.pidfd_open(self.criu_pid)
        except ProcessLookupError:
            raise SessionLostError("CRIU ended at once") from None


def read_dump_stats(directory: Path) -> Any:
    """`dump_stats_entry` of a finished dump (times in µs), or None when it cannot be read."""
    try:
        data = (directory / "stats-dump").read_bytes()
        (length,) = struct.unpack_from("<I", data, 8)  # two magic words, a length, the message
        return _Stats.FromString(data[12 : 12 + length]).dump
    except (OSError, struct.error, ValueError):
        return None
    except Exception:  # protobuf's DecodeError has no public home in all versions
        return None
