"""Scripts for DistributedDataParallel as people write them, which know nothing of p3kv, and what
becomes of them with p3kv: `python -m experiments.as_it_is`."""
