"""The dataset: records, the store that reads them, the image reader, the split, the validation."""
