"""Figures in words: a number with its noun, bytes in the unit that shows them, layouts that fit a line."""

from __future__ import annotations

from picotron_ray.layout.layout import Layout

SHORT = 70
"""Letters of a layout in a table."""


def counted(count: int, noun: str) -> str:
    """A number and its noun, in the plural where it is not one.

    >>> counted(1, "node"), counted(2, "node"), counted(2, "micro-batch")
    ('1 node', '2 nodes', '2 micro-batches')
    """
    plural = f"{noun}{'es' if noun.endswith(('ch', 's', 'sh', 'x')) else 's'}"
    return f"{count} {noun if count == 1 else plural}"


def unit_of(size: float) -> tuple[float, str]:
    """Bytes of the unit that shows so many, and its name.

    >>> unit_of(3.4e7), unit_of(2e9)
    ((1000000.0, 'MB'), (1000000000.0, 'GB'))
    """
    return (1e9, "GB") if size >= 1e9 else (1e6, "MB")


def said_bytes(size: float) -> str:
    """Bytes in words.

    >>> said_bytes(3.45e7), said_bytes(6.48e10)
    ('34.5 MB', '64.8 GB')
    """
    unit, name = unit_of(size)
    return f"{size / unit:.3g} {name}"


def short_name(layout: Layout, most: int = SHORT) -> str:
    """A layout's name, without what recomputation does stage by stage where it would be too long.

    >>> short_name(Layout(dp=2, pp=4, recompute="blocks-2-1,blocks-2-1,blocks-1-1,none"), 30)
    'dp2-tp1-pp4-1f1b-mb1-blocks...'
    """
    name = str(layout)
    if len(name) > most and "," in layout.recompute:
        name = name.replace(f"-{layout.recompute}", "-blocks...")
    return name if len(name) <= most else f"{name[: most - 3]}..."
