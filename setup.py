"""For tools that still look for it, and for the licence: metadata is in pyproject.toml.

There, the setuptools of Python 3.8 reads the licence only as a table, and newer ones are about to
refuse that.
"""

from setuptools import setup

setup(license="Apache-2.0")
