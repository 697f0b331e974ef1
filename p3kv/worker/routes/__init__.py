"""Ways of gradients to the servers, and of values back."""

from p3kv.worker.routes.host_sums import HostSums
from p3kv.worker.routes.rows import RowsPull, RowsPush, RowsRoute
from p3kv.worker.routes.slices import SliceRoute
