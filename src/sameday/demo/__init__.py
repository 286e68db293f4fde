"""A generated question set and a tiny model, so that everything can be tried at once, without a download."""
