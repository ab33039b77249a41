"""How numbers are written."""

from __future__ import annotations

__all__ = ["format_percent", "format_ratio", "format_significant", "round_significant"]


def format_percent(fraction: float) -> str:
    """Format a fraction with two decimals, as the paper prints its savings; more where it would round to 100%.

    >>> format_percent(1 - 39_388_160 / 157_552_640), format_percent(0.99998)
    ('75.00%', '99.998%')
    """
    for decimals in range(2, 8):
        text = f"{fraction:.{decimals}%}"
        if fraction >= 1 or float(text[:-1]) < 100:
            break
    return text


def format_ratio(ratio: float) -> str:
    """Format a speed-up: one decimal, none from a thousand on.

    >>> format_ratio(31.13), format_ratio(1894.2)
    ('31.1×', '1,894×')
    """
    return f"{ratio:,.1f}×" if ratio < 1000 else f"{ratio:,.0f}×"


def format_significant(value: float) -> str:
    """Format a positive number with three significant digits at least, and no more than three decimals.

    >>> format_significant(0.1374), format_significant(2.718), format_significant(1541.13)
    ('0.137', '2.72', '1,541')
    """
    decimals = next((places for places, bound in ((3, 1), (2, 10), (1, 100)) if value < bound), 0)
    return f"{value:,.{decimals}f}"


def round_significant(value: float) -> str:
    """Round to three significant digits, without an exponent.

    >>> round_significant(0.1374), round_significant(1541.13)
    ('0.137', '1,540')
    """
    return f"{float(f'{value:.3g}'):,.10g}"
