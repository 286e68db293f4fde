"""Proof: whether two plans train the same model."""
