"""What jobs do otherwise than those whose history an older build began: asked by `workflow.patched`, by these names.

The answer is a marker in the history, and a replay has to ask at the same place. One that is asked for the first time
after a call was begun and given up within the same task does not fit its replay: the engine takes such a task in two
pieces, and looks for the marker in the first. So a history that is begun now asks for all of them at once.
"""

from __future__ import annotations

from typing import Final

from temporalio import workflow

_FIRST: Final = "patches-first"

PATCHES: Final = (
    "ahead-once",
    "beside",
    "cut-of-living",
    "due-last",
    "even-widths",
    "keep-processes",
    "kept-is-progress",
    "late-cancel",
    "publish-told",
    "some-stay",
    "update-turn-2",
    "widths",
    "wish-kept",
)
"""``update-turn`` is asked only where ``update-turn-2`` is not answered with yes."""


def decide() -> None:
    """Asks for all, in the first task of a run."""
    if workflow.patched(_FIRST):
        for name in PATCHES:
            workflow.patched(name)
