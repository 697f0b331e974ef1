"""A live view of a running job."""

from p3kv.tools.top.view import watch

__all__ = ["watch"]
