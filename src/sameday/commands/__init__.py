"""Commands that train, evaluate and fill caches, and the start-up that they share with all others."""
