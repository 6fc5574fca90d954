"""Text for terminals and readers of lines: made safe to show, measured in columns, and shortened."""

import re
from typing import Final

# A name with more columns is shortened in the middle, even if there is room for it.
MAX_NAME_COLUMNS: Final = 40
_BREAKS: Final = re.compile("[\u2028\u2029\x85\r\n]")


def printable(text: str) -> str:
    """Return `text` on one line: runs of white space become one space, unprintable characters become escapes.

    The text may come from any source, so it must not move the cursor, colour the terminal or reverse the line.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))


def on_one_line(text: str) -> str:
    """Return JSON in which no reader finds the end of a line: Python and JavaScript know more of them than JSON.

    The three that may stand in strings are escaped; the others are between two values.
    """
    if text.isascii() and "\n" not in text and "\r" not in text:  # nearly always
        return text
    return _BREAKS.sub(lambda found: " " if found[0] in "\r\n" else f"\\u{ord(found[0]):04x}", text)


def type_name(value: object) -> str:
    """Return the qualified name of the type of `value`, as a user would write it."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters and the number of characters that were cut out of its middle."""
    left = len(text) - most
    return text if left <= 0 else f"{text[: most // 2]} ... [{left} characters] ... {text[-(most // 2) :]}"


def width(text: str) -> int:
    """Return the number of terminal columns that `text` takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width  # here, because few texts need it

    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def clip(text: str, columns: int) -> str:
    """Return `text`, cut with an ellipsis if it takes more than `columns`."""
    if width(text) <= columns:
        return text
    kept, used = "", 1
    for c in text:
        used += width(c)
        if used > columns:
            break
        kept += c
    return kept + "…"


def shorten(text: str, columns: int) -> str:
    """Return `text`, with an ellipsis in its middle if it takes more than `columns`; so its end stays visible."""
    if width(text) <= columns:
        return text
    head = clip(text, columns // 2 + 1)
    tail = clip(text[::-1], columns - width(head) + 1)[:-1]
    return head + tail[::-1]


def pad(text: str, columns: int) -> str:
    """Return `text` with spaces up to `columns`."""
    return text + " " * (columns - width(text))
