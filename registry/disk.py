"""Files that are replaced whole: readers see the old one or the new one, and a crash, or a full disk, leaves one."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["make_folder", "no_folder", "write_atomic", "written"]


def write_atomic(path: Path, text: str) -> None:
    """Replace a file whole."""
    with written(path, text) as put_in_place:
        put_in_place()


@contextlib.contextmanager
def written(path: Path, text: str) -> Iterator[Callable[[], object]]:
    """Write the text to a file beside `path`, and give the function that puts it in place; unused, it is removed.

    A link stays a link. A device or a pipe, such as /dev/null, is written to: a superuser could replace it.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield functools.partial(path.write_text, text, encoding="utf-8")
        return
    place = Path(os.path.realpath(path))
    if place.is_dir():  # or the error would name a file of ours
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    make_folder(place.parent)
    with _told_of(path):
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.", suffix=".tmp")
    try:
        with _told_of(path), os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(name, 0o644)

        def put_in_place() -> None:
            with _told_of(path):
                os.replace(name, place)

        yield put_in_place
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


@contextlib.contextmanager
def _told_of(path: Path) -> Iterator[None]:
    """Errors name the file that was asked for, not one of ours beside it, which is gone by then."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def make_folder(path: Path) -> None:
    """Make a folder, and those around it, that nobody else may write to, whatever the umask says."""
    if not path.is_dir():
        make_folder(path.parent)
        try:
            path.mkdir(mode=0o755, exist_ok=True)
        except FileExistsError as error:  # "File exists" would be said of what is wanted
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from error


def no_folder(path: Path) -> str:
    """Why files cannot be kept in a folder, or why it cannot be made; empty where nothing is seen that is against it.
    Nothing is made here."""
    for place in (path, *path.parents):
        try:
            mode = os.stat(place).st_mode
        except (FileNotFoundError, NotADirectoryError):
            if place.is_symlink():
                return f"{place} is a link to nothing"
            continue
        except OSError as error:
            return f"{place}: {error.strerror or error}"
        if not stat.S_ISDIR(mode):
            return f"{place} is no folder"
        return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} may not be written to"
    return ""
