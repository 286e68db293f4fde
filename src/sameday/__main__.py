"""`python -m sameday` is the same command as `sameday`; torchrun starts it this way."""

from sameday.cli import main

if __name__ == "__main__":  # worker processes import this file too
    main()
