"""What a command printed, as a picture of a terminal: sameday demo | python bench/picture.py docs/demo.svg"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

LINE, WIDTH, MARGIN = 18, 7.9, 18


def picture(text: str) -> str:
    lines = text.rstrip("\n").split("\n")
    wide = max(map(len, lines)) * WIDTH + 2 * MARGIN
    high = len(lines) * LINE + 2 * MARGIN
    rows = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + (i + 0.75) * LINE:.0f}" xml:space="preserve">{escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    style = 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13" fill="#d8dee9"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high}" width="{wide:.0f}" height="{high}">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#1d232b"/>\n<g {style}>\n{rows}\n</g>\n</svg>\n'
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(sys.stdin.read()), encoding="utf-8")
