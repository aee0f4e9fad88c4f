"""The package: what it is called, what it needs, and its command."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
    name="megatron-ntp",
    version=runpy.run_path(str(ROOT / "megatron_ntp" / "__init__.py"))["__version__"],
    description="Nonuniform tensor parallelism for Megatron: training goes on when a GPU is lost",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    # The scripts go along, so that `megatron-ntp rehearse` works without a checkout.
    packages=[*find_packages(include=["megatron_ntp", "megatron_ntp.*"]), "megatron_ntp.scripts"],
    package_dir={"megatron_ntp.scripts": "scripts"},
    package_data={"megatron_ntp": ["patches/*", "launchers/*.sbatch"]},
    # megatron-core ships its training loop from 0.17 on, and no wheel of it is for Python 3.14.
    python_requires=">=3.12,<3.14",
    install_requires=[
        "nvidia-ml-py",
        "psutil",  # Megatron's training loop and checkpoints import it
        "packaging",
        "pybind11",  # builds the dataset helpers of a Megatron-LM checkout
        "pyyaml",
        "torch>=2.6",
    ],
    # Not a requirement: whoever trains has a Megatron, often a checkout, and must not get a second.
    extras_require={
        "megatron": ["megatron-core>=0.17,<0.20"],
        "dev": ["hypothesis", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "ruff"],
        "plot": ["matplotlib"],
        "te": ["transformer-engine[pytorch]"],
    },
    entry_points={"console_scripts": ["megatron-ntp = megatron_ntp.cli:main"]},
)
