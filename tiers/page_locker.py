"""Page-locking host memory, and mapping it for a GPU: on the one thread that has the context current.

Sources: CUDA driver API manual (cuMemHostRegister, cuMemHostGetDevicePointer).
"""

from __future__ import annotations

from typing import Final

from .driver import check, cuda_driver, use_primary_context
from .memory import format_bytes

__all__ = ["MEMLOCK_ADVICE", "PageLocker"]

MEMLOCK_ADVICE: Final = (
    "raise the limit on locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity, "
    "docker run --ulimit memlock=-1)"
)


class PageLocker:
    """Registers host memory with the driver, on the thread that made it.

    Args:
        ordinal: the N of ``cuda:N``.

    Raises:
        ConfigError: no driver answers, or cuda-python is not installed.
        KVPagerError: there is no such device, or its context cannot be had.
    """

    def __init__(self, ordinal: int) -> None:
        self._driver = cuda_driver()
        self._locked: list[int] = []
        self._device = use_primary_context(self._driver, ordinal)

    def lock(self, address: int, nbytes: int) -> int:
        """Page-lock and map; returns the device address less the host address.

        Raises:
            KVPagerError: the driver refuses it.
        """
        driver = self._driver
        flags = driver.CU_MEMHOSTREGISTER_DEVICEMAP | driver.CU_MEMHOSTREGISTER_PORTABLE
        check(driver.cuMemHostRegister(address, nbytes, flags), f"page-locking {format_bytes(nbytes)}")
        self._locked.append(address)
        pointer = check(driver.cuMemHostGetDevicePointer(address, 0), "mapping host memory for the GPU")
        return int(pointer) - address

    def unlock(self, address: int) -> None:
        """Take one registration back."""
        self._locked.remove(address)
        check(self._driver.cuMemHostUnregister(address), "unregistering host memory")

    def close(self) -> None:
        """Take all registrations back, and the hold on the context."""
        try:
            for address in tuple(self._locked):
                self.unlock(address)
        finally:
            check(self._driver.cuDevicePrimaryCtxRelease(self._device), "releasing the CUDA context")
