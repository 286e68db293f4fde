"""The models, each as a thin layer over its library's own modules."""
