"""The wheel has all packages inside of one, so that nothing called `recipes` or `callbacks` is installed."""

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

NAME = "lightning_recipes"
FOLDERS = ("callbacks", "conf", "recipes")
TEMPLATE = "recipes.project"  # whose folder template/ is copied as it is: no packages of this project
INNER = find_namespace_packages(include=[f"{folder}*" for folder in FOLDERS], exclude=[f"{TEMPLATE}.*"])


class BuildWithScript(build_py):
    """Put train.py, which lies beside the packages here, into the one that is installed."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [*modules, (NAME, "train", "train.py")] if package == NAME else modules


setup(
    packages=[NAME, *(f"{NAME}.{name}" for name in INNER)],
    package_dir={NAME: NAME} | {f"{NAME}.{folder}": folder for folder in FOLDERS},
    package_data={
        "": ["*.yaml", "*.json", "*.css", "*.jinja", "*.js", "*.LICENSE", "py.typed"],
        f"{NAME}.{TEMPLATE}": ["template/**", "template/.*", "template/.github/**"],
    },
    cmdclass={"build_py": BuildWithScript},
)
