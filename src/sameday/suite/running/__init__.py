"""Who runs the jobs, here or through a scheduler, and what becomes of them."""
