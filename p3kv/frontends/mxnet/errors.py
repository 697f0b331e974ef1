"""Errors of calls that MXNet's own stores refuse, too: a script may catch them as MXNet's."""

from __future__ import annotations

import mxnet as mx

from p3kv import errors


class KeyMismatchError(errors.KeyMismatchError, mx.base.MXNetError):
    """A key is unknown or declared twice, or an array does not fit it."""
