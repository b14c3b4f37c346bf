"""Elements of a drawing."""

from __future__ import annotations

from html import escape


def label(css: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    """Text whose baseline is at y; anchor: start, middle, end."""
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line."""
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def begin(css: str, width: float, height: float, title: str) -> str:
    """The drawing's opening tag; `title` is for who does not see it."""
    return (
        f'<svg class="{css}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">'
    )
