"""Texts and file names in UTF-8, whatever the locale: what is written on one machine is read on another, and libraries
take no path whose letters Python could not decode."""

from __future__ import annotations

import codecs
import os
import sys

MODE = "PYTHONUTF8"


def in_utf_8() -> None:
    """In a process that is a command, before anything else. Python decides at its start, under a locale such as C for
    ASCII if it was told to: then the process starts again, with the same number, and its children start so too."""
    known = codecs.lookup(sys.getfilesystemencoding()).name == "utf-8"
    if known or os.environ.get(MODE) == "1" or not (sys.executable and sys.orig_argv):
        return
    os.environ[MODE] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
