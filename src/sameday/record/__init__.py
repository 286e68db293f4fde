"""A run's files on disk: its folder, its checkpoints, and whether they are what was written. No models here."""
