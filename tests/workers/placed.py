"""Trains as `exact.py` does; then each worker says where every parameter has been kept."""

import p3kv  # noqa: F401, I001

import exact  # noqa: F401  has trained when it is imported
from p3kv.worker import this_process

for key in this_process.worker()._keys.values():
    print(f"{key.size_elems} elements:", *(f"{length}@{server}" for server, length in key.runs))
