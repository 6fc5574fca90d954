"""An exception of one's own for each of those that wait for the same thing."""

from ..._errors import NodeError


def twin_of(error: BaseException) -> BaseException:
    """Return an equal exception that is another object: one object raised twice would collect notes and tracebacks."""
    cls = type(error)
    try:
        # Not `cls(*args)`: constructors of JAX's errors take more than they keep.
        twin = cls.__new__(cls, *error.args)
        twin.__dict__.update(error.__dict__)
    except Exception:  # noqa: BLE001 - an exception that cannot be made again; any constructor may raise anything
        twin = NodeError(f"failed with another caller: {error!r}")
        twin.__cause__ = error
        return twin
    twin.args = error.args
    if "__notes__" in error.__dict__:
        twin.__notes__ = list(error.__notes__)
    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    return twin.with_traceback(error.__traceback__)
