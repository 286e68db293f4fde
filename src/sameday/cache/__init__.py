"""What is computed from images, kept on disk: one file per image content, for many jobs at once."""
