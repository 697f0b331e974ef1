"""Trains as `exact.py` does; then each worker says where every parameter has been kept."""

import p3kv  # noqa: F401, I001

import exact  # has trained when it is imported

for key in exact.stores[0]._own.declared():
    print(f"{key.size_elems} elements:", *(f"{length}@{server}" for server, length in key.runs))
