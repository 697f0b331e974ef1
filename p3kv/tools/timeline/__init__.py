"""Timeline of a whole job, put together from the traces of its processes."""

from p3kv.tools.timeline.timeline import Pair, Timeline, Traced, pairs, read_job

__all__ = ["Pair", "Timeline", "Traced", "pairs", "read_job"]
