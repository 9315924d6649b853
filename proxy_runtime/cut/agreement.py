"""What the proxies of a job agree on at a cut: pure functions of the counts that they report.

A *sequence* is a communicator (``"7"``) or one direction of a pair of its members (``"7:0>1"``, what group rank 0
sends to 1). Its operations are numbered from 1 at every member. An operation completes anywhere only when all
members have contributed to it, so nothing beyond the target below can be complete, and everything up to it
completes without any rank running (``proxy_runtime/device/native/collectives.hpp``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from proxy_runtime.errors import ErgoError


class AgreementError(ErgoError, ValueError):
    """The counts of a cut or a checkpoint do not fit together."""

    code = "cut.counts-differ"


class SequenceCounts(TypedDict):
    """One rank's counts in one sequence.

    Attributes:
        contributed: operations that the rank has issued.
        completed: of these, how many have delivered their result (always a prefix).
        members: global ranks of all members, in group order.
    """

    contributed: int
    completed: int
    members: Sequence[int]


def targets(reports: Iterable[Mapping[str, SequenceCounts]]) -> dict[str, int]:
    """Computes up to which number every sequence is finished by the cut.

    Args:
        reports: per rank, what its proxy reported after it had stopped: sequence -> counts. A member that does
            not list a sequence (it has not defined the communicator yet, or never used the pair) counts 0.

    Returns:
        Per sequence the smallest number of operations that any member has contributed.

    Raises:
        AgreementError: members disagree about who they are, a member reports twice, or something beyond the
            target is complete already; the reports are not of one stop, or a member's report is missing.
    """
    by_sequence: dict[str, list[SequenceCounts]] = {}
    for report in reports:
        for sequence, counts in report.items():
            by_sequence.setdefault(sequence, []).append(counts)
    result: dict[str, int] = {}
    for sequence, all_counts in by_sequence.items():
        members = list(all_counts[0]["members"])
        if any(list(counts["members"]) != members for counts in all_counts):
            raise AgreementError(f"Communicator {sequence}: its ranks report different members.", remedy=_REMEDY)
        if len(all_counts) > len(members):
            raise AgreementError(
                f"Communicator {sequence}: {len(all_counts)} reports for its {len(members)} members {members}.",
                remedy=_REMEDY,
            )
        silent = len(members) - len(all_counts)
        target = 0 if silent else min(counts["contributed"] for counts in all_counts)
        ahead = max(counts["completed"] for counts in all_counts)
        if ahead > target:
            missing = f", {silent} of them not reported" if silent else ""
            raise AgreementError(
                f"Communicator {sequence} of ranks {members}{missing}: operation {ahead} is complete at a member, "
                f"but another has contributed only {target}.",
                remedy=_REMEDY,
            )
        result[sequence] = target
    return result


def verify_completed(
    reports: Iterable[Mapping[str, Mapping[int, int] | Mapping[str, int]]],
    members: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, int]:
    """Checks that every member of every sequence has completed the same operations.

    The first symptom of a wrong cut is not an error but ranks that wait for each other for ever; this check,
    after finishing a cut and again at load, turns it into a sentence.

    Args:
        reports: per proxy (or per rank): sequence -> rank -> completed count.
        members: who belongs to a sequence, where known: members that no report lists count 0.

    Returns:
        The common count per sequence.

    Raises:
        AgreementError: counts differ; names the communicator and the ranks.
    """
    completed: dict[str, dict[int, int]] = {}
    for report in reports:
        for sequence, by_rank in report.items():
            known = completed.setdefault(sequence, {})
            for rank, count in by_rank.items():
                if known.setdefault(int(rank), count) != count:
                    raise AgreementError(
                        f"Communicator {sequence}: rank {rank} is reported with {known[int(rank)]} and with {count} "
                        "completed operations.",
                        remedy=_REMEDY,
                    )
    for sequence, ranks in (members or {}).items():
        for rank in ranks:
            completed.setdefault(sequence, {}).setdefault(rank, 0)
    result: dict[str, int] = {}
    for sequence, known in completed.items():
        if len(set(known.values())) > 1:
            listed = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(known.items()))
            raise AgreementError(
                f"Communicator {sequence}: its ranks have completed different numbers of operations ({listed}); "
                "going on from here would never end.",
                remedy=_REMEDY,
            )
        if known:
            result[sequence] = next(iter(known.values()))
    return result


_REMEDY = "Go back to an earlier checkpoint; if the job still runs, resume it and cut again."
