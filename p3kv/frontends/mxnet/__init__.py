"""MXNet: `kvstore='p3'` and `'dist_sync_p3'`. `front_end` attaches it when MXNet is imported."""
