"""Many jobs as one: their graph, when they will be done, and who runs them."""
