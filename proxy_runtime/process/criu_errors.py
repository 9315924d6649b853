"""CRIU's log lines, said in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proxy_runtime.errors import ErgoError


class CriuError(ErgoError):
    """A process tree could not be dumped or restored. The job that was to be dumped runs on."""

    code = "criu"


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: re.Pattern[str]
    code: str
    message: str  # may name groups of the pattern
    remedy: str


def _rule(pattern: str, code: str, message: str, remedy: str = "") -> _Rule:
    return _Rule(re.compile(pattern), f"criu.{code}", message, remedy)


_UPGRADE: Final = "Let Ergosphere use its own (unset ERGO_CRIU), or install CRIU 4.2 or later; then run `ergo doctor`."
_ROOT: Final = "Run as root, with CAP_SYS_ADMIN and CAP_CHECKPOINT_RESTORE; `ergo doctor` shows what is missing."
_CLOSE: Final = "Close it before the cut; sockets between ranks belong into torch.distributed."

# The first rule that matches any error line wins: causes before consequences.
_RULES: Final = (
    _rule(
        r"Unexpected rt vDSO area|Can't get 1:16 opt|Can't splice all pages",
        "too-old",
        "this CRIU is too old for the running kernel.",
        _UPGRADE,
    ),
    _rule(r"CRIU needs to have the CAP_|Operation not permitted.*(ptrace|seize)", "not-permitted",
          "CRIU lacks privileges.", _ROOT),
    _rule(r"No space left on device", "disk-full", "the disk with the process images is full.",
          "Free space there; the job runs on."),
    _rule(r"Zombies with threads", "exiting", "a process was just exiting.", "Try again."),
    _rule(r"Can't fork for (?P<pid>\d+): File exists", "pid-in-use", "pid {pid} is in use in the container.",
          "Restore into a fresh container."),
    _rule(r"File (?P<file>\S+) has bad (?P<what>size|build-ID|mode)", "file-differs",
          "the file {file} differs ({what}) from the one that was in use at the checkpoint.",
          "Restore with the files of the checkpoint's volume and the same installation."),
    _rule(r"Can't open file (?P<file>\S+).*No such file|Can't open fake fifo", "file-missing",
          "a file that was in use at the checkpoint is missing here: {line}.",
          "Make it available under the same path."),
    _rule(r"anon_inode:\[io_uring\]", "io-uring", "a process uses io_uring, which CRIU cannot checkpoint.",
          "For torch's TCPStore pass use_libuv=False."),
    _rule(r"External socket is used|half of stream unix connection|unix: Dangling connection", "unix-connection",
          "a process holds a UNIX socket connected to a process outside of the job.", _CLOSE),
    _rule(r"Connected TCP socket", "tcp-connection", "a process holds an open TCP connection.", _CLOSE),
    _rule(r"Can't dump ghost file (?P<file>\S+)", "ghost-file",
          "the deleted but open file {file} is larger than the limit for such files.",
          "Use smaller data loader batches, or a higher ghost_limit."),
    _rule(r"Can't link remap to (?P<file>.*): Invalid cross-device link", "replaced-file",
          "a process still has {file} open or mapped, a file from before the job that was replaced or deleted since.",
          "Close it, or load a copy: the job directory has only the new file."),
    _rule(r"send_fds failed|Can't dump file .* of that type|unsupported.*file", "unsupported-file",
          "a process has an open file of a kind that CRIU cannot checkpoint: {line}.",
          "Close it before the cut, or run without what opens it."),
    _rule(r"Some file locks are hold", "file-lock", "a file lock is shared with a process outside of the job.",
          "Release it before the cut."),
    _rule(r"SysVIPC shmem", "sysv-shm", "a process shares System V memory with a process outside of the job.", _CLOSE),
    _rule(r"session leader|A session leader is outside", "session",
          "a process belongs to a terminal session outside of the container."),
    _rule(r"kerndat_tcp_repair", "loopback-down", "the loopback interface in the container is down."),
    _rule(r"Can't lookup mount", "foreign-descriptor",
          "a process holds a file that was opened outside of the container's mounts: {line}."),
    _rule(r"(Can't|Unable to) open.*(pages|core|mm|inventory|pstree)[^ ]*\.img|Unexpected EOF on|Magic doesn't match|"
          r"Failed unpacking|pb_read|image.*corrupt", "image-damaged",
          "the process images are damaged or incomplete: {line}.", "Go back to another checkpoint."),
    _rule(r"No such process|Can't find task|seize.*No such", "gone",
          "the process has ended before it could be dumped."),
    _rule(r"Unable to open fd", "file-missing", "a file that was in use at the checkpoint cannot be opened: {line}.",
          "Make it available under the same path."),
)  # fmt: skip


def error_lines(log: Path) -> list[str]:
    """Error lines of a CRIU log without time stamps. The rlimit complaint, always there, is left out."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return []
    lines = (re.sub(r"^\([\d.]+\)\s*(\d+:\s*)?", "", line) for line in text.splitlines() if "Error (" in line)
    return [line for line in lines if "rlimit" not in line and "RLIMIT" not in line]


def explain(lines: Iterable[str], doing: str) -> CriuError:
    """The error that says best what the lines mean.

    Args:
        lines: as from `error_lines`.
        doing: start of the sentence, e.g. ``rank 3 could not be dumped``.
    """
    lines = list(lines)
    for rule in _RULES:
        for line in lines:
            match = rule.pattern.search(line)
            if match:
                groups = {key: value or "" for key, value in match.groupdict().items()}
                message = rule.message.format(line=_bare(line), **groups)
                return CriuError(f"{doing}: {message}", code=rule.code, remedy=rule.remedy)
    detail = _bare(lines[0]) if lines else "CRIU gave no reason"
    return CriuError(f"{doing}: {detail}.", code="criu.failed", remedy="The log with all details is beside the images.")


def _bare(line: str) -> str:
    return re.sub(r"^Error \([^)]*\):\s*", "", line).strip().rstrip(".")
