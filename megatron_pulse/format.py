"""Formatting of numbers for people."""

from __future__ import annotations


def format_number(value: float, digits: int = 3) -> str:
    """Format with ``digits`` digits; large numbers become integers, never exponents."""
    if abs(value) >= 10**digits - 0.5:
        return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:.0f}"
    return f"{value:.{digits}g}"


def in_ms(seconds: float, digits: int = 4) -> str:
    """Milliseconds, formatted as by ``format_number``."""
    return f"{format_number(1e3 * seconds, digits)} ms"


def in_mb(num_bytes: float, digits: int = 3) -> str:
    """Megabytes of 10^6 bytes, formatted as by ``format_number``."""
    return f"{format_number(num_bytes / 1e6, digits)} MB"


def with_plural(number: int, what: str) -> str:
    """Number and noun, with a plural in s."""
    return f"{number:,} {what}{'s' * (number != 1)}"
