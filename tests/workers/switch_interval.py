"""Prints Python's switch interval before, with and after the store, in seconds."""

import atexit
import sys

print_it = lambda: print(f"{sys.getswitchinterval():.6f}", flush=True)  # noqa: E731
atexit.register(print_it)  # before p3kv's own: it is called after them

import p3kv  # noqa: F401, E402

print_it()
import mxnet as mx  # noqa: E402

store = mx.kv.create("p3")
print_it()
