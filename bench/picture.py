"""Pictures for the README, of a terminal and of a page in a headless Chromium:
sameday demo | python bench/picture.py docs/demo.svg
python bench/picture.py docs/report-light.png runs/demo/report.html
python bench/picture.py docs/report-phone-dark.png runs/demo/report.html --size 390x1290 --dark --at curves"""

from __future__ import annotations

import argparse
import io
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


def page_picture(page: Path, size: tuple[int, int], dark: bool, at: str) -> bytes:
    """What a screen of this size shows of a page, from the section `at` on, in 256 colours."""
    from browser import Browser, find_chromium
    from PIL import Image

    program = find_chromium()
    if program is None:
        sys.exit("no Chromium on this machine: `make browser` installs one, where there are apt and root")
    with Browser(program) as browser:
        browser.open(page, *size, dark=dark, density=2 if size[0] < 600 else 1)
        browser.evaluate(f"document.getElementById({at!r})?.scrollIntoView({{behavior: 'instant'}})")
        shot = browser.screenshot()
    small = io.BytesIO()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    return small.getvalue()


def _size(text: str) -> tuple[int, int]:
    wide, _, high = text.partition("x")
    return int(wide), int(high)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the picture: .svg of what is piped in, .png of a page")
    parser.add_argument("page", type=Path, nargs="?", help="an HTML file")
    parser.add_argument("--size", type=_size, default=(1440, 1720), help="of the screen, in pixels")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--at", default="", help="a section's id")
    asked = parser.parse_args()
    if asked.page is None:
        asked.out.write_text(picture(sys.stdin.read()), encoding="utf-8")
    else:
        asked.out.write_bytes(page_picture(asked.page, asked.size, asked.dark, asked.at))
