"""Starting and supervising all processes of a job, on this machine or on several hosts."""

from p3kv.launcher.hosts import Host, parse_hosts
from p3kv.launcher.launch import launch, launch_on
from p3kv.launcher.parts import Part, job_parts
from p3kv.launcher.supervisor import Graces, Launcher

__all__ = ["Graces", "Host", "Launcher", "Part", "job_parts", "launch", "launch_on", "parse_hosts"]
