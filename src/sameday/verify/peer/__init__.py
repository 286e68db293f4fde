"""Another trainer over the same steps, and what it and a plan of ours agree on."""
