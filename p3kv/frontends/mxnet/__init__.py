"""MXNet: `kvstore='p3'` and `'dist_sync_p3'`.

Every process imports `front_end`, which attaches the rest when MXNet is imported. The rest imports
MXNet: import `mxnet` before any of it.
"""
