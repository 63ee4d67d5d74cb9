"""How the wheel is built: recipes/ and conf/ lie inside the package, not as importable folders of everybody's."""

from setuptools.command.build_py import build_py

BUNDLED = {"lightning_parallel.bundled.recipes": "recipes", "lightning_parallel.bundled.conf": "conf"}


class BuildPy(build_py):
    """setuptools' own, with two folders more; a list of packages would have to name all others too."""

    def finalize_options(self) -> None:
        """See setuptools."""
        super().finalize_options()
        self.packages = [*self.packages, *BUNDLED]
        self.package_dir = self.package_dir | BUNDLED
        self.package_data = self.package_data | {package: ["**/*.yaml"] for package in BUNDLED}

    def get_source_files(self) -> list[str]:
        """What a source distribution must hold too: the wheel is built from it."""
        return [*super().get_source_files(), ".ci/wheel.py", "CHANGELOG.md"]
