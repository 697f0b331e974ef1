"""The types of p3kv's stores. MXNet looks for 'dist', '_sync' and 'async' in them."""

from __future__ import annotations

ASYNC_TYPE = "dist_async_p3"
SYNC_TYPE = "dist_sync_p3"
