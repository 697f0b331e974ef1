"""Starting and supervising all processes of a job, on this machine or on several hosts."""

from p3kv.launcher.agents import Agent, agents_on
from p3kv.launcher.hosts import Host, address_of_first, parse_hosts
from p3kv.launcher.launch import launch, launch_on
from p3kv.launcher.parts import Part, job_parts
from p3kv.launcher.supervisor import Graces, Launcher

__all__ = [
    "Agent",
    "Graces",
    "Host",
    "Launcher",
    "Part",
    "address_of_first",
    "agents_on",
    "job_parts",
    "launch",
    "launch_on",
    "parse_hosts",
]
