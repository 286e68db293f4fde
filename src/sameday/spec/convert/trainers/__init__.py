"""What is particular about the configs of each trainer."""
