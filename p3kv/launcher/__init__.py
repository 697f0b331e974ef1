"""Starting and supervising all processes of a job on this machine."""

from p3kv.launcher.launch import launch
from p3kv.launcher.parts import Part, job_parts
from p3kv.launcher.supervisor import Graces, Launcher

__all__ = ["Graces", "Launcher", "Part", "job_parts", "launch"]
