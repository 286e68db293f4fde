"""What a run is: recipe (what model comes out), plan (how it is run), and the folder that records it. No torch."""
