"""The wheel is a copy of this folder under one name, so that nothing called `recipes` or `callbacks` is installed."""

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

NAME = "lightning_recipes"
INNER = find_namespace_packages(include=["callbacks*", "conf*", "recipes*"])


class BuildWithoutSetup(build_py):
    """Leave this file out: it lies in the folder that becomes the package."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[1] != "setup"]


setup(
    packages=[NAME, *(f"{NAME}.{name}" for name in INNER)],
    package_dir={NAME: "."},
    package_data={"": ["*.yaml", "*.css", "*.jinja", "*.js", "*.LICENSE"]},
    cmdclass={"build_py": BuildWithoutSetup},
)
