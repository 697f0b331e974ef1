"""What pyproject.toml can't say; the rest of the metadata is there.

The setuptools of Python 3.8 reads the licence there only as a table, and newer ones are about to
refuse that. A package's page shows the README without the repository around it.
"""

import re
from pathlib import Path

from setuptools import setup


def without_the_repository(text: str) -> str:
    """README without pictures and links that lead to its files: their words stay."""
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    license="Apache-2.0",
    long_description=without_the_repository(Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
