"""How fast a training step could be here at best, and how near a plan comes to that."""
