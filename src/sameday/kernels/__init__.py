"""Pieces of computation that have more than one implementation, each beside the plain one it must equal."""
