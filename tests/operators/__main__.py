"""The whole of PyTorch's operator tables on the proxied device, compared with the checked-in list.

python -m tests.operators                       everything, resumable (hours under load, see docs/operators.md)
python -m tests.operators --dtypes float32 --ops add,matmul --ordinary
python -m tests.operators --update              … and write what was found into the list, reasons kept
python -m tests.operators --docs                only write docs/operators.md from the list
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.operators import document, driver, expected, outcome
from tests.operators.selection import TABLES, Selection
from tests.proxy_runtime.rank.launcher import Launcher

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    options = _arguments()
    if options.docs:
        document.write()
        return 0
    from proxy_runtime import build

    runtime = build.ensure(progress=lambda line: print(line, file=sys.stderr))
    selection = Selection(options.tables, options.dtypes, options.ops, options.cap, not options.ordinary)
    results = options.results or ROOT / "build" / "operators" / f"{runtime.id}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        results.unlink(missing_ok=True)
    start = time.monotonic()
    driver.run(Launcher(runtime.rank_dir, runtime.device_dir), selection, results, silence_s=options.silence)
    found = outcome.read(results, selection)
    print(f"{results}: {found.summary()}, {time.monotonic() - start:.0f} s now")
    if options.update:
        expected.update(found)
        document.write(found)
    differences = expected.compare(expected.load(), found)
    print("\n".join(differences) or "as the list says")
    return 1 if differences else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.operators", description="PyTorch's operator tables on the device"
    )

    def names(text: str) -> tuple[str, ...]:
        return tuple(filter(None, text.split(",")))

    parser.add_argument("--tables", type=names, default=TABLES, help="of op,foreach,module,optim; default all")
    parser.add_argument("--dtypes", type=names, default=(), help="default: every one that an entry names")
    parser.add_argument("--ops", type=names, default=(), help="names of entries; default all")
    parser.add_argument("--cap", type=int, default=0, help="samples an entry, dtype and phase; default all")
    parser.add_argument("--ordinary", action="store_true", help="leave the extended phases out")
    parser.add_argument("--results", type=Path, help="where results are kept; default build/operators/<build>.jsonl")
    parser.add_argument("--fresh", action="store_true", help="forget the results that are there")
    parser.add_argument("--silence", type=float, default=120.0, help="seconds after which a step is a hang")
    parser.add_argument("--update", action="store_true", help="write what was found into the list and the document")
    parser.add_argument("--docs", action="store_true", help="write the document from the list, run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
