"""How each kind of caller has its workers update weights, for the advice of errors.

Only gluon's Trainer has `update_on_kvstore`. An error often can't know who will read it: a server
raises it, or a store that several callers may be given. So the advice names all of them.
"""

from __future__ import annotations

WORKERS = (
    "run the optimizer on the workers: Trainer(..., update_on_kvstore=False); for Module, "
    "SVRGModule and FeedForward, MXNET_UPDATE_ON_KVSTORE=0 in the environment of all processes; a "
    "script that calls the store itself sets no optimizer and updates by the sums that it pulls"
)
SERVERS = (
    "let the servers update: Trainer without update_on_kvstore=False; Module without "
    "MXNET_UPDATE_ON_KVSTORE=0; in a script that calls the store itself, kv.set_optimizer"
)
