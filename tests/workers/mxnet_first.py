"""Imports mxnet first, which leaves the roles of scheduler and server to MXNet's own."""

import mxnet as mx  # noqa: I001
import p3kv  # noqa: F401

print(mx.kv.create("p3").rank)
