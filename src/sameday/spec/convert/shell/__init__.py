"""A shell script that starts a trainer, read without running it."""
