"""Python and packages, from metadata and files."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from megatron_ntp import __version__
from megatron_ntp.doctor.findings import Finding, fail, note, ok, warn

PYTHONS = ((3, 12), (3, 13))
MIN_TORCH = "2.6"

# Distribution name, and what it is for.
_NEEDED = {
    "psutil": "Megatron's training loop and checkpoints import it",
    "pyyaml": "settings and site files are YAML",
    "packaging": "versions are compared with it",
    "pybind11": "builds the dataset helpers of a Megatron-LM checkout",
}
_CUDA_TEXT = re.compile(r"^cuda\b[^=]*=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)


def installed(distribution: str) -> str | None:
    """A package's version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_software() -> list[Finding]:
    """Everything about this Python and its packages, megatron-core left out."""
    return [
        _python(),
        ok("megatron-ntp", f"{__version__} in {Path(__file__).resolve().parents[1]}"),
        _torch(),
        _kernels(),
        *_packages(),
    ]


def _python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] in PYTHONS:
        return ok("Python", found)
    return fail("Python", found, "megatron-core 0.17 to 0.19 needs Python 3.12 or 3.13")


def _torch() -> Finding:
    version = installed("torch")
    if version is None:
        return fail("torch", "is not installed for this Python", "pip install torch")
    cuda = torch_cuda()
    found = f"{version}, built for {'CUDA ' + cuda if cuda else 'CPU only'}"
    if Version(version) < Version(MIN_TORCH):
        return fail("torch", found, f"megatron-ntp needs torch {MIN_TORCH} or newer")
    return ok("torch", found)


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built for, from its version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        found = _CUDA_TEXT.search((Path(spec.origin).parent / "version.py").read_text())
    except OSError:
        return None
    return found.group(1) if found else None


def _kernels() -> Finding:
    """Transformer Engine or Apex: Megatron's optimizer comes from one of them."""
    engine = installed("transformer-engine")
    apex = installed("apex")
    if engine or apex:
        found = [f"Transformer Engine {engine}" if engine else "", f"Apex {apex}" if apex else ""]
        return ok("kernels", ", ".join(filter(None, found)))
    return warn(
        "kernels",
        "neither Transformer Engine nor Apex is installed",
        "CPU rehearsals do without. On GPUs install transformer-engine[pytorch]: without both, "
        "Megatron 0.19 cannot load optimizer state",
    )


def _packages() -> list[Finding]:
    missing = {name: why for name, why in _NEEDED.items() if installed(name) is None}
    findings = [
        fail("packages", f"{name} is not installed: {why}", f"pip install {name}")
        for name, why in missing.items()
    ]
    if not missing:
        findings.append(ok("packages", ", ".join(f"{n} {installed(n)}" for n in _NEEDED)))
    if installed("nvidia-ml-py") is None:
        cure = "pip install nvidia-ml-py, for health checks and the power boost"
        findings.append(note("packages", "nvidia-ml-py is not installed", cure))
    return findings
