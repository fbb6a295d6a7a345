"""Lists the packages of the five folders, which pyproject.toml maps to `headrace.*`: setuptools finds no such names."""

from setuptools import find_packages, setup

FOLDERS = ("actors", "buffer", "policies", "sandboxes", "serve")
setup(packages=[f"headrace.{name}" for folder in FOLDERS for name in find_packages(include=[folder, f"{folder}.*"])])
