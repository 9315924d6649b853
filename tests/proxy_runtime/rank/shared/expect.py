"""What the scripts share."""

from collections.abc import Callable


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], text: str, action: Callable[[], object]) -> str:
    """Runs `action`, which must raise `kind` with `text` in its message; returns the message."""
    try:
        action()
    except kind as error:
        assert text in str(error), (text, str(error))
        return str(error)
    raise AssertionError(f"nothing raised {text}")
