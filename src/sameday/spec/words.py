"""Numbers as people read them."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """A number for people: up to four digits that matter, thousands apart, small ones with an exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "not finite"
    size = abs(value)
    if size >= 1e7 or size < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.4g}"
