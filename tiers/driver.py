"""The CUDA driver through cuda-python: whether it answers, and the context that torch uses.

Nothing here touches cuda-python before ``cuInit(0)`` of the driver itself has answered, so all of it can be
asked on a machine without a GPU. Source: the CUDA driver API manual.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any, Final

from .errors import ConfigError, KVPagerError
from .extras import how_to_install
from .settings import expect_text

__all__ = [
    "DriverDevice",
    "check",
    "cuda_driver",
    "device_ordinal",
    "driver_answers",
    "driver_devices",
    "find_device",
    "let_reach",
    "use_primary_context",
    "why_no_driver",
]

_DEVICE: Final = re.compile(r"cuda(:[0-9]{1,4})?")


_NAME_BYTES: Final = 256
_BUS_ID_BYTES: Final = 32


@dataclass(frozen=True)
class DriverDevice:
    """A GPU as the driver tells it to this process; ``cuda:N`` is the N-th.

    Args:
        name: what it is called.
        bus_id: its place on the PCI bus, as in sysfs: ``0000:17:00.0``; empty where the driver does not say.
    """

    name: str
    bus_id: str


def driver_answers() -> bool:
    """Whether a CUDA driver is installed and finds a device."""
    return why_no_driver() is None


def why_no_driver() -> str | None:
    """None where a CUDA driver is installed and finds a device, else why not, in words."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "the driver's library libcuda.so.1 is not here"
    status = library.cuInit(0)
    return None if status == 0 else f"cuInit answers with error {status}"


def driver_devices() -> list[DriverDevice]:
    """The GPUs that the driver lets this process use, without cuda-python; none where no driver answers.

    Raises:
        KVPagerError: the driver does not tell of one.
    """
    if not driver_answers():
        return []
    library = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    if library.cuDeviceGetCount(ctypes.byref(count)):
        raise KVPagerError("the CUDA driver does not say how many devices there are")
    found = []
    for ordinal in range(count.value):
        name = ctypes.create_string_buffer(_NAME_BYTES)
        bus_id = ctypes.create_string_buffer(_BUS_ID_BYTES)
        # A device's handle is its ordinal's, which need not be the same number.
        device = ctypes.c_int()
        if library.cuDeviceGet(ctypes.byref(device), ordinal) or library.cuDeviceGetName(
            name, _NAME_BYTES, device
        ):
            raise KVPagerError(f"the CUDA driver does not tell of device {ordinal}")
        if library.cuDeviceGetPCIBusId(bus_id, _BUS_ID_BYTES, device):
            bus_id.value = b""
        found.append(DriverDevice(name.value.decode(errors="replace"), bus_id.value.decode().lower()))
    return found


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


def find_device(device: str) -> int:
    """The N of ``cuda:N``, if there is such a GPU and it can be used.

    Raises:
        ConfigError: ``device`` is no ``cuda:N``, no driver answers, cuda-python is not installed, or the
            machine has fewer GPUs.
    """
    ordinal = device_ordinal(device)
    count = check(cuda_driver().cuDeviceGetCount(), "counting the CUDA devices")
    if ordinal >= count:
        raise ConfigError("device", f"there is no cuda:{ordinal}: this machine has {count} CUDA devices")
    return ordinal


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


def let_reach(reader: str, owner: str) -> None:
    """Let kernels on the GPU `reader` read and write the memory of the GPU `owner` at the same addresses.

    It holds for the process, for memory that was or will be allocated there, over NVLink or PCIe. Doing it
    again changes nothing. Source: CUDA driver API manual, peer context memory access.

    Raises:
        ConfigError: one of them is no CUDA device, no driver answers, cuda-python is not installed, or the
            two are not connected so.
        KVPagerError: the driver refuses.
    """
    ordinals = device_ordinal(reader), device_ordinal(owner)
    if ordinals[0] == ordinals[1]:
        return
    driver = cuda_driver()
    handles = [check(driver.cuDeviceGet(ordinal), f"opening CUDA device {ordinal}") for ordinal in ordinals]
    if not check(driver.cuDeviceCanAccessPeer(*handles)):
        raise ConfigError("device", f"{reader} cannot reach the memory of {owner}")
    before = check(driver.cuCtxGetCurrent())
    try:
        # Both contexts are those of torch, which keeps them: they are not given back.
        use_primary_context(driver, ordinals[1])
        context = check(driver.cuCtxGetCurrent())
        use_primary_context(driver, ordinals[0])
        (status,) = driver.cuCtxEnablePeerAccess(context, 0)
        if status != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            check((status,), f"letting {reader} reach {owner}")
    finally:
        check(driver.cuCtxSetCurrent(before))
