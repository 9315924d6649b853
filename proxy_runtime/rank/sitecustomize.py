"""Start-up hook of a rank: Python runs it before any user code.

It does nothing unless the environment names a channel. A ``sitecustomize`` of the user's, further down the
path, still runs.
"""

import os
import sys


def _start_rank() -> None:
    if "ERGO_CHANNEL" not in os.environ and "ERGO_DEVICES" not in os.environ:
        return
    try:
        from ergo_rank import boot

        if "ERGO_DEVICES" in os.environ:
            boot.join_tree()
        else:
            boot.take_channel()
    except BaseException as error:  # Python would report a failing hook and run the script without its device
        print(f"ergosphere: this rank cannot start: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _run_next() -> None:
    """Runs the module that this one hides, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    rest = [p for p in sys.path if os.path.abspath(p or os.getcwd()) != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_start_rank()
_run_next()
