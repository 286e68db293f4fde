"""An image's name in a line: the file behind it, or what is wrong with it, and how sentences show it."""

from __future__ import annotations

import re
from pathlib import Path

NOT_FOUND, OUTSIDE = "not found under", "leaves the image root"
LONG = 200
"""Characters from which on a name is shown in part."""
SHOWN = 60
"""Characters of it that are shown."""
# "data:image/png;base64,..." or, without such a beginning, base64 of a JPEG, PNG, GIF or WEBP.
_CONTENT = re.compile(r"(?i:data:)|(?=.{200})(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR)", re.DOTALL)
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_ALLOWED = "allowed is a path; save the images as files under image_root and name these"


def named(name: str) -> str:
    """As a sentence shows it: a name may be a whole image in base64."""
    return repr(name) if len(name) < LONG else f"{name[:SHOWN] + '…'!r} ({len(name):,} characters)"


def located(name: str, root: Path) -> Path | str:
    """The file behind an image's name, or what is wrong with it."""
    if _CONTENT.match(name):
        return f"is an image itself and no path; {_ALLOWED}"
    if _ADDRESS.match(name):
        return f"is an address and no path; {_ALLOWED}"
    try:
        place = (root / name).resolve()
        if not place.is_relative_to(root):
            return f"{OUTSIDE} {root}: it is {named(str(place))}"
        if place.is_file():
            return place
        return f"is not a file but a folder or device under {root}" if place.exists() else f"{NOT_FOUND} {root}"
    except OSError as error:
        return f"cannot be reached under {root}: {error.strerror or error}"
    # A loop of links, a NUL or half a surrogate in the name: no path at all.
    except (RuntimeError, ValueError) as error:
        return f"is no usable path: {error}"
