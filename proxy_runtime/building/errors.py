"""The one error class of the native build."""

from __future__ import annotations

from proxy_runtime.errors import ErgoError


class BuildError(ErgoError):
    """The runtime cannot be built, or a build cannot be used.

    Codes: ``build.python-missing``, ``build.python-version``, ``build.torch-missing``, ``build.torch-version``,
    ``build.torch-cpu-only``, ``build.no-compiler``, ``build.no-space``, ``build.sources-missing``,
    ``build.compile``, ``build.unknown``, ``build.damaged``.
    """

    code = "build"
