"""Weights in folders, named by their content."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final

__all__ = ["Digest", "digest_folder", "folder_of", "last_change", "state_of_folder"]

_READ_BYTES: Final = 8 << 20
_HEX_DIGITS: Final = frozenset("0123456789abcdef")
_SHA_DIGITS: Final = (40, 64)
"""Of git's and of large files' digests, by which a Hugging Face cache names its blobs."""
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_CODE: Final = ".py"
"""Of a model that brings its own."""
_CONFIGURATIONS: Final = frozenset(
    (
        "config.json",
        "params.json",
        "adapter_config.json",
        # How weights are quantised, as ModelOpt, AutoGPTQ and AutoAWQ write it.
        "hf_quant_config.json",
        "quantize_config.json",
        "quant_config.json",
    )
)


def folder_of(model: str, revision: str | None) -> Path:
    """Where the files of a model are: the folder or file of that name, or where a Hugging Face cache has it.

    Raises:
        OSError: neither is there.
    """
    folder = Path(model).expanduser()
    if folder.exists():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def digest_folder(folder: Path) -> bytes:
    """32 bytes that name the weights in a folder by their content, its configuration files and its code.

    Files of a Hugging Face cache are links to blobs that are named by their digests, and are not read.

    Raises:
        OSError: a file cannot be read, or there are no weights.
    """
    state = hashlib.blake2b(digest_size=32)
    paths = [folder] if folder.is_file() else sorted(_files(folder))
    if not any(path.suffix in _WEIGHTS for path in paths):
        raise FileNotFoundError(f"no weights in {folder}")
    for path in paths:
        state.update(f"{len(path.name)}|{path.name}|".encode())
        state.update(_digest_file(path))
    return state.digest()


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if (
            path.suffix in _WEIGHTS or path.suffix == _CODE or path.name in _CONFIGURATIONS
        ) and path.is_file():
            yield path


def _digest_file(path: Path) -> bytes:
    target = path.resolve()
    if (
        target.parent.name == "blobs"
        and len(target.name) in _SHA_DIGITS
        and _HEX_DIGITS.issuperset(target.name)
    ):
        return f"blob|{target.name}".encode()
    state = hashlib.blake2b(digest_size=32)
    with target.open("rb") as file:
        while part := file.read(_READ_BYTES):
            state.update(part)
    return b"file|" + state.digest()


def state_of_folder(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """The files that `digest_folder` reads of a folder: name, inode, bytes and time of change of each."""
    looks = ((path.name, path.stat()) for path in sorted(_files(folder)))
    return tuple((name, look.st_ino, look.st_size, look.st_mtime_ns) for name, look in looks)


def last_change(folder: Path) -> int:
    """When a folder last came to have the weights that it has, in ns since the epoch, by the system's clock.

    Of what is written, linked or renamed into place; not the time that a copy takes over with its files.
    """
    looks = [path.stat() for path in _files(folder)]
    return max(look.st_ctime_ns for look in (*looks, folder.stat(), folder.lstat()))


class Digest:
    """What names an engine's weights, made in a thread: it reads those that are not from a cache of digests.

    Args:
        make: the bytes.
        log: where it is said that they cannot be made: then nothing is found or kept.
    """

    def __init__(self, make: Callable[[], bytes], log: logging.Logger) -> None:
        self._make = make
        self._log = log
        self._made: Future[bytes] = Future()
        threading.Thread(target=self._run, name="kvpager-digest", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait until they are made or cannot be, so many seconds at most."""
        try:
            self._made.exception(seconds)
        except TimeoutError:
            self._log.info(
                "kvpager: the weights are being digested; nothing is found or kept until that is done"
            )

    @property
    def value(self) -> bytes | None:
        """The bytes; None where they are not made yet, or cannot be. Does not wait."""
        if not self._made.done() or self._made.exception() is not None:
            return None
        return self._made.result()

    def _run(self) -> None:
        try:
            self._made.set_result(self._make())
        except (OSError, ValueError) as error:  # also of weights that were never a file
            self._log.warning("kvpager: nothing is found or kept: the weights cannot be digested (%s)", error)
            self._made.set_exception(error)
        except Exception as error:  # noqa: BLE001  of the engine's own classes, which serves on without
            self._log.exception("kvpager: nothing is found or kept: the weights cannot be digested")
            self._made.set_exception(error)
