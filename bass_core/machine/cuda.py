"""Find out whether PyTorch can compute on a CUDA device, and explain in one sentence what to do if it can't."""

from __future__ import annotations

import re
from contextlib import suppress

import torch

# The build for CUDA 12.6 has kernels for older GPUs. The version keeps within the bound of requirements.txt.
OLD_BUILDS = '"torch<=2.13.0" for CUDA 12.6 (cu126), with the command that pytorch.org shows'


def why_unusable(device: torch.device) -> str | None:
    """Return why PyTorch can't compute on a CUDA device, as a clause, or None if it can.

    Torch's own count of devices is not enough: it asks NVML, which answers under drivers that are too old for this
    PyTorch, and for GPUs that it has no kernels for. So a kernel is tried.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this PyTorch ({torch.__version__}) is built without CUDA: install a build with CUDA (docs/gpu.md)"
    try:
        torch.cuda.init()
        if (device.index or 0) >= (count := torch.cuda.device_count()):
            devices = "1 CUDA device" if count == 1 else f"{count} CUDA devices"
            return f"PyTorch sees {devices} on this machine, counted from cuda:0"
        _try_kernel(device)
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        return _explanation(str(error), device)
    return None


def gpu_expected() -> bool:
    """Return whether somebody may expect the GPU to be used: PyTorch is built for one, or NVML finds one here."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return True
    with suppress(Exception):  # the package or the driver is missing
        import pynvml

        pynvml.nvmlInit()
        return bool(pynvml.nvmlDeviceGetCount())
    return False


def _try_kernel(device: torch.device) -> None:
    torch.zeros(8, device=device).add_(1).cpu()


def _explanation(message: str, device: torch.device) -> str:
    """Explain an error of CUDA's start or first kernel. The phrases are those of torch's c10/cuda."""
    built = torch.version.cuda
    if "driver on your system is too old" in message:
        version, supports = re.search(r"found version (\d+)", message), ""
        if version is not None:  # 12040 is CUDA 12.4
            supports = f" (it supports CUDA {int(version[1]) // 1000}.{int(version[1]) % 1000 // 10})"
        if built is not None and int(built.split(".")[0]) >= 13:
            cure = f"install driver 580 or newer, or PyTorch's build for older drivers ({OLD_BUILDS})"
        else:
            cure = "install a newer driver"
        return f"the NVIDIA driver is too old for this PyTorch, which is built for CUDA {built}{supports}: {cure}"
    if "no NVIDIA driver" in message:
        return "PyTorch finds no NVIDIA driver: install one, or start the container with docker run --gpus all"
    if "No CUDA GPUs" in message:
        return "the NVIDIA driver shows no GPU: check CUDA_VISIBLE_DEVICES and nvidia-smi"
    if "no kernel image" in message:
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        return (
            f"this PyTorch, which is built for CUDA {built}, has no kernels for {name} (compute capability "
            f"{major}.{minor}): install its build for older GPUs ({OLD_BUILDS})"
        )
    lines = message.splitlines()
    return f"CUDA does not start ({lines[0].rstrip('.') if lines else 'no reason given'}): check nvidia-smi"
