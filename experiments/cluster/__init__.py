"""The throttled cluster, on which experiments and tests measure."""

from experiments.cluster.cluster import Cluster, LinkGoodput, missing_requirements
from experiments.cluster.host import Host
from experiments.cluster.netns import ClusterError

__all__ = ["Cluster", "ClusterError", "Host", "LinkGoodput", "missing_requirements"]
