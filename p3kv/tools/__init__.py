"""Tools that people run beside a job, or before one."""
