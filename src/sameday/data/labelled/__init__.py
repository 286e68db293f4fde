"""Images with labels: sets from batches or folders, crops and flips, batches."""
