"""Checks for what could keep a job from running well here, before it starts."""

from p3kv.tools.doctor.findings import OK, PROBLEM, WARNING, Finding
from p3kv.tools.doctor.hosts import examine_hosts
from p3kv.tools.doctor.settings import check_settings
from p3kv.tools.doctor.this_host import examine

__all__ = ["OK", "PROBLEM", "WARNING", "Finding", "check_settings", "examine", "examine_hosts"]
