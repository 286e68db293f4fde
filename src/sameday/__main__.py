"""`python -m sameday` is the same command as `sameday`; torchrun starts it this way."""

from sameday.cli import main

main()
