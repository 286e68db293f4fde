"""From another trainer's config to a recipe and a plan."""
