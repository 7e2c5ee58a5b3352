"""The CUDA driver through cuda-python: whether it answers, and the context that torch uses.

Nothing here touches cuda-python before ``cuInit(0)`` of the driver itself has answered, so all of it can be
asked on a machine without a GPU. Source: the CUDA driver API manual.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any, Final

from .errors import ConfigError, KVPagerError
from .extras import how_to_install
from .settings import expect_text

__all__ = ["check", "cuda_driver", "device_ordinal", "driver_answers", "use_primary_context"]

_DEVICE: Final = re.compile(r"cuda(:[0-9]{1,4})?")


def driver_answers() -> bool:
    """Whether a CUDA driver is installed and finds a device."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(library.cuInit(0) == 0)


def cuda_driver() -> Any:
    """The module ``cuda.bindings.driver``, initialised.

    Raises:
        ConfigError: no driver answers, or cuda-python is not installed.
    """
    if not driver_answers():
        raise ConfigError("device", "no CUDA driver answers on this machine")
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError("device", f"CUDA needs cuda-python: {how_to_install('cuda')}") from error
    check(driver.cuInit(0))
    return driver


def check(result: tuple[Any, ...], what: str = "a CUDA call") -> Any:
    """What a cuda-python call returned beside its status: None, one value, or a tuple of several.

    Raises:
        KVPagerError: the status is not success; the message names it and ``what`` was being done.
    """
    status, *values = result
    if int(status) != 0:
        raise KVPagerError(f"{what} failed: {status.name}")
    return values[0] if len(values) == 1 else (tuple(values) or None)


def device_ordinal(device: str) -> int:
    """The N of ``cuda:N``; 0 for ``cuda``.

    Raises:
        ConfigError: ``device`` is neither.
    """
    name = expect_text("device", device)
    if _DEVICE.fullmatch(name) is None:
        raise ConfigError("device", f"must be cuda or cuda:N, got {name!r}")
    number = name.partition(":")[2]
    return int(number or 0)


def use_primary_context(driver: Any, ordinal: int) -> Any:
    """Make the device's primary context, the one torch uses, current on this thread; returns the device.

    It is retained: the caller gives it back with ``cuDevicePrimaryCtxRelease``.

    Raises:
        KVPagerError: there is no such device, or its context cannot be had.
    """
    handle = check(driver.cuDeviceGet(ordinal), f"opening CUDA device {ordinal}")
    context = check(
        driver.cuDevicePrimaryCtxRetain(handle), f"retaining the context of CUDA device {ordinal}"
    )
    check(driver.cuCtxSetCurrent(context), f"entering the context of CUDA device {ordinal}")
    return handle
