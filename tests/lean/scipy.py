"""Takes the place of scipy in tests' jobs. MXNet imports it where it is, and needs it for nothing
that p3kv uses; this takes a third of the time that an import of MXNet takes."""

raise ImportError("tests' jobs have what p3kv needs, not what the experiments need")
