"""Files written whole: at no moment does a name stand for half of a file."""

import contextlib
import os
import threading
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a text (as UTF-8) or bytes into a file, all of it or nothing. Folders above it are made.

    The content goes under a temporary name beside `path`, which then takes its place in one step. Raises OSError where that cannot be done
    and UnicodeEncodeError for a text that is not UTF-8: then an old file stays as it was, and no temporary one is left.
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of this writer's own: two processes may compile, and keep, the same kernel.
    fresh = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.new")
    try:
        fresh.write_bytes(data)
        os.replace(fresh, path)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
