"""The fastest plan for a recipe on this machine, and what each choice was worth."""
