"""MXNet: `kvstore='p3'` and `'dist_sync_p3'`, registered when this package is imported."""

from p3kv.frontends.mxnet.registration import register

register()
