"""What a run is: recipe (what model comes out) and plan (how it is run), from what a user wrote. No torch."""
