"""A live view of a running job."""

from p3kv.top.view import watch

__all__ = ["watch"]
