"""Written files: a file that is there whole, or not at all."""

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: "str | os.PathLike[str]", parts: Iterable[str]) -> None:
    """Write a file of text; whoever looks at it meanwhile sees the old one, and a failure leaves that as it was.

    Args:
        path: where; its folder exists.
        parts: the text.

    Raises:
        OSError: it cannot be written there.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.writelines(parts)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
