"""Train the same model, the same day."""

__version__ = "0.1.0"
