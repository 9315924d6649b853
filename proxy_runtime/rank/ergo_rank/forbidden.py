"""What would hand a device address to somebody who dereferences it, or tell of another device: raises, and says why."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__all__ = ["install"]


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"{what} is not possible on an Ergosphere device: the memory of CUDA tensors is in the device proxy, not in "
        "this process. Copy the tensor to the CPU first."
    )


def install() -> None:
    """Replaces dlpack, the CUDA array interface, sharing between processes, and questions to the driver."""
    tensor = torch.Tensor
    dlpack = tensor.__dlpack__
    interface: Any = tensor.__cuda_array_interface__

    def guarded_dlpack(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _refuse("dlpack") if self.device.type == "cuda" else dlpack(self, *args, **kwargs)

    def array_interface(self: torch.Tensor) -> Any:
        return _refuse("__cuda_array_interface__") if self.device.type == "cuda" else interface.__get__(self)

    tensor.__dlpack__ = guarded_dlpack  # type: ignore[method-assign]
    tensor.__cuda_array_interface__ = property(array_interface)  # type: ignore[method-assign, assignment]

    to_dlpack = torch._C._to_dlpack

    def guarded_to_dlpack(data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _refuse("dlpack") if data.device.type == "cuda" else to_dlpack(data, *args, **kwargs)

    torch._C._to_dlpack = guarded_to_dlpack
    torch.to_dlpack = guarded_to_dlpack
    torch.utils.dlpack.to_dlpack = guarded_to_dlpack

    def share(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        _refuse("Sharing a CUDA tensor with another process")

    torch.UntypedStorage._share_cuda_ = share  # type: ignore[method-assign, assignment]

    def external_stream(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "torch.cuda.ExternalStream is not possible on an Ergosphere device: a stream of another library is not "
            "ordered with the device proxy. Use torch.cuda.Stream."
        )

    torch.cuda.ExternalStream.__new__ = external_stream  # type: ignore[method-assign, assignment]

    def no_handle(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "The driver's library (NVML) cannot be asked about an Ergosphere device, e.g. for its utilization or its "
            "temperature: the device is another process's, and may be on another machine later."
        )

    torch.cuda._get_pynvml_handler = no_handle
