"""Pure mathematics on tensors and numbers: nothing here knows of ranks, buckets or collectives."""
