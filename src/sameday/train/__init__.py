"""The loop, and what it stands on: steps, optimizer, what it remembers, what is shown while it runs."""
