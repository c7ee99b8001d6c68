"""Make torchvision's CUDA build, the only one on PyPI, importable with a CPU build of PyTorch.

    .venv/bin/python scripts/torchvision_cpu.py      installs this file into the environment; `make setup` runs it

The operators of that build cannot be loaded without CUDA, and `import torchvision` then fails, because it registers
shapes for two of them. So these two are declared, without an implementation, just before torchvision is imported: image
processors do not call them. With a CUDA build of PyTorch, or torchvision's own CPU build, nothing is declared.

Remove this file once PyPI has torchvision for the CPU.
"""

import sys

NAME = "_torchvision_cpu"
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class DeclareOperators:
    """A finder of modules that finds only torchvision, and declares the operators before it is executed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (declare(), execute(module))
        return spec


def declare() -> None:
    """Declare the operators if torchvision cannot load its own."""
    from importlib.metadata import version

    import torch

    if hasattr(torch, "_torchvision_cpu"):
        return
    if torch.version.cuda is None and "+cpu" not in version("torchvision"):
        library = torch.library.Library("torchvision", "DEF")
        for operator in OPERATORS:
            library.define(operator)
        torch._torchvision_cpu = library  # the declarations end with this object


def install() -> None:
    """Copy this file to site-packages, with a `.pth` file that runs `activate` at the start of Python."""
    import sysconfig
    from pathlib import Path

    packages = Path(sysconfig.get_path("purelib"))
    (packages / f"{NAME}.py").write_text(Path(__file__).read_text())
    (packages / f"{NAME}.pth").write_text(f"import {NAME}; {NAME}.activate()\n")


def activate() -> None:
    """Wait for torchvision to be imported. Python runs a `.pth` file twice if lib64 is a link to lib."""
    if DeclareOperators not in sys.meta_path:
        sys.meta_path.insert(0, DeclareOperators)


if __name__ == "__main__":
    install()
