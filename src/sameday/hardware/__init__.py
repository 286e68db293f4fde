"""What this machine offers: devices, ranks, kernels, and the choices that follow, each with its reason."""
