"""Runs entries of PyTorch's tables in a rank: each result on the device is compared with the CPU's.

worker.py SELECTION RESULTS PROGRESS     SELECTION: JSON, see selection.py; tasks that RESULTS holds are left out.

Ends with 0 when all is done, with 9 when the channel to the device cannot be used any more.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
from in_rank import extended, modules, operators
from in_rank.checking import Case, Progress
from in_rank.entries import Task, finished, tasks
from selection import Selection, parse

POISONED = 9


def run(case: Case, selection: Selection) -> None:
    if case.task.table == "module":
        modules.run_module(case, selection.cap)
    elif case.task.table == "optim":
        modules.run_optimizer(case, selection.cap)
    else:
        operators.run(case, selection.cap)
        if selection.extended:
            extended.run(case, selection.cap)


def record(case: Case, task: Task, seconds: float) -> str:
    failures = [[phase, kind, *what] for (phase, kind), what in case.failures.items()]
    return json.dumps(
        {
            "task": task.key,
            "counts": dict(case.counts),
            "failures": failures,
            "cpu_errors": case.cpu_errors,
            "cpu_s": round(seconds, 2),
        }
    )


def main() -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Otherwise gradients of several uses of a tensor are summed in an order that depends on the thread.
    torch.autograd.set_multithreading_enabled(False)
    selection, results, progress = parse(sys.argv[1]), Path(sys.argv[2]), Progress(sys.argv[3])
    done = finished(results)
    with results.open("a") as out:
        for n, task in enumerate(tasks(selection)):
            if task.key in done:
                continue
            case = Case(task, progress)
            start = time.process_time()
            try:
                run(case, selection)
            except Exception:
                case.fail("harness", "harness", traceback.format_exc()[-380:], 0)
            usable = case.probe(n)
            out.write(record(case, task, time.process_time() - start) + "\n")
            out.flush()
            if not usable:
                os._exit(POISONED)


main()
