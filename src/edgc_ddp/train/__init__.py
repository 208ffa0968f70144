"""A byte-level GPT trained with DDP and the EDGC hook, configured by Hydra."""
