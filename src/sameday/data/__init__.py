"""From question files to tensors: readers and audit, order and partition (pure), layout of rows, loader."""
