"""Start of a job's processes, and the role of this one."""
