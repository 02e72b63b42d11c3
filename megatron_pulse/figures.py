"""How figures are written for people."""

from __future__ import annotations


def plain(value: float, digits: int = 3) -> str:
    """To so many digits, or a whole number: never with an exponent where it is large."""
    if abs(value) >= 10**digits - 0.5:
        return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:.0f}"
    return f"{value:.{digits}g}"


def in_ms(seconds: float, digits: int = 4) -> str:
    """Milliseconds, as ``plain`` has them."""
    return f"{plain(1e3 * seconds, digits)} ms"


def in_mb(num_bytes: float, digits: int = 3) -> str:
    """Megabytes of 10^6 bytes, as ``plain`` has them."""
    return f"{plain(num_bytes / 1e6, digits)} MB"


def counted(number: int, what: str) -> str:
    """So many of ``what``, which has its plural with an s."""
    return f"{number:,} {what}{'s' * (number != 1)}"
