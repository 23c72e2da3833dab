"""Training-side utilities: processes, collectives on nested structures, data loading, and the Accelerator that joins them."""
