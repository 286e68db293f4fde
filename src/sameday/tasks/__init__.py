"""What is learned. A task owns its data, its forward pass and its loss; the loop never asks which one it runs."""
