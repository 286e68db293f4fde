"""From files to tensors: what all tasks share here, and a folder for each kind of data."""
