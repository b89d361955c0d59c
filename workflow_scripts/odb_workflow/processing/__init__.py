"""From a record to the tensors of one sample."""
