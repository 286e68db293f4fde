"""From question files to tensors: readers and audit, images, tokens, partition (pure), layout of rows, batches."""
