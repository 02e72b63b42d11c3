"""How figures are written for people."""

from __future__ import annotations


def in_ms(seconds: float, digits: int = 4) -> str:
    """Milliseconds to so many digits, or whole ones: never with an exponent."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g} ms"
