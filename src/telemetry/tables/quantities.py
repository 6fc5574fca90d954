"""Numbers as people read them: three digits, with their unit, and `-` for what is not known."""

UNKNOWN = "-"


def significant(value: float) -> str:
    """Return a number with about three digits: 1,234 and 12.3 and 0.123."""
    if value and abs(value) < 0.0005:
        return "<0.001"
    for least, decimals in ((99.95, 0), (9.995, 1), (0.9995, 2)):
        if abs(value) >= least:
            return f"{value:,.{decimals}f}"
    return f"{value:.3f}" if value else "0"


def count(value: int | None) -> str:
    """Return a number of things."""
    return UNKNOWN if value is None else f"{value:,}"


def of(value: int, limit: int | None) -> str:
    """Return how much of a limit is used: 3/16."""
    return f"{value:,}/{count(limit)}"


def seconds(value: float | None) -> str:
    """Return a time in seconds, whatever its size, so that those of a column can be compared."""
    return UNKNOWN if value is None else f"{significant(value)} s"


def milliseconds(value_seconds: float | None) -> str:
    """Return a time, given in seconds, in milliseconds."""
    return UNKNOWN if value_seconds is None else f"{significant(value_seconds * 1000)} ms"


def rate(per_second: float | None, noun: str = "") -> str:
    """Return how many of something there are in a second: 12.3/s, 12.3 calls/s."""
    return UNKNOWN if per_second is None else f"{significant(per_second)}{noun and ' ' + noun}/s"


def duration(value_seconds: float | None) -> str:
    """Return a time of any size in its two largest units: 12.3 s, 4 min 10 s, 3 d 4 h."""
    if value_seconds is None or value_seconds < 60:
        return seconds(value_seconds)
    minutes, whole_seconds = divmod(int(value_seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole_seconds} s"


def scaled(value: float | None, unit: str) -> str:
    """Return a large quantity with a decimal prefix: 12.3 GB, 1.23 TFLOP/s."""
    if value is None:
        return UNKNOWN
    for least, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * least:
            return f"{significant(value / least)} {prefix}{unit}"
    return f"{significant(value)} {unit}"
