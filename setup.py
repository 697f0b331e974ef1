"""Kept for tools that still look for it; the metadata is in pyproject.toml."""

from setuptools import setup

setup()
