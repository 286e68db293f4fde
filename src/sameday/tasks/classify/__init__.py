"""Classification: labels of images, learned by small vision models that are trained from scratch."""
