"""The loop, and what it stands on: optimizer, checkpoints, what is shown while it runs."""
