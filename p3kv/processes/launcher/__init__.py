"""Starting and supervising all processes of a job, on this machine or on several hosts."""

from p3kv.processes.launcher.agents import Agent, agents_on
from p3kv.processes.launcher.launch import launch, launch_on
from p3kv.processes.launcher.parts import Host, address_of_first, job_parts, parse_hosts
from p3kv.processes.launcher.process import JobPart
from p3kv.processes.launcher.supervisor import Graces, Launcher

__all__ = [
    "Agent", "Graces", "Host", "JobPart", "Launcher", "address_of_first", "agents_on",
    "job_parts", "launch", "launch_on", "parse_hosts",
]  # fmt: skip
