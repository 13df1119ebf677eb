"""Why an output cannot be written where the user wants it: found before any work. No torch here."""

import os
import re
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path

from megatron.common.checkpoint_folders import MANIFEST
from megatron.common.errors import first_line

_NO_DISKS = ("proc", "sys")
"""Folders of the root whose permissions do not say that nobody can create files there."""


def folder_problem(named: str, folder: Path) -> str | None:
    """Why the output ``folder`` cannot be created or written to, as a message that starts with ``named``; else None."""
    if problem := _name_problem(folder):
        return f"{named} {problem}; name another folder"
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        return f"{named} {existing} is not a folder; name another folder, or move it away"
    place = os.path.realpath(existing)
    if place == "/dev" or place.split(os.sep)[1] in _NO_DISKS:  # below it /dev has disks in memory
        return f"{named} {existing} is of the system, and holds no files of users; name another folder"
    if (existing / MANIFEST).exists():
        return f"{named} {existing} is a checkpoint, and is refused with other files in it; name another"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{named} no permission to write in {existing}; name another folder, or change its permissions"
    return None


def file_problem(flag: str, name: str) -> str | None:
    """Why the file ``name`` cannot be written, as a message about ``flag``; None if it can."""
    file = Path(name)
    if problem := _name_problem(file):
        return f"{flag} {file}: {problem}; name another file"
    if is_folder_name(name):
        return f"{flag} {name} is a folder; name a file"
    if not file.exists():  # also a dangling link, which is replaced
        return folder_problem(f"{flag} {file}:", file.parent)
    if file.is_fifo() or file.is_socket():
        return f"{flag} {file} is no file, and writing to it may wait forever; name a file"
    if not os.access(file, os.W_OK):
        return f"{flag} {file}: no permission to write it; name another file, or change its permissions"
    return None


def is_folder_name(name: str) -> bool:
    """Whether ``name`` can only be a folder's: one that exists, or a name that ends in a slash."""
    return os.path.isdir(name) or os.path.basename(name) in ("", ".", "..")


def outputs_in_one_place(outputs: Mapping[str, tuple[str | Path | None, Iterable[str]]]) -> list[str]:
    """A message for each two flags of which one writes a file that the other writes as well, or needs as a folder.

    Each flag has a folder, or None if it is not given, with the names of what is written into it; or a file, with an
    empty name.
    """
    places = [
        (flag, named, os.path.realpath(os.path.join(named, name)))
        for flag, (named, names) in outputs.items()
        if named is not None
        for name in names
    ]
    problems = [
        f"{flag} {named} is what {other} {written} writes; name another file"
        for (other, written, at), (flag, named, place) in combinations(places, 2)
        if flag != other and os.path.commonpath((place, at)) in (place, at)
    ]
    return list(dict.fromkeys(problems))


def _name_problem(path: Path) -> str | None:
    """Why ``path`` is not a valid name, such as its length, a URL or an unexpanded ~ or $VARIABLE; None if it is valid.

    A URL is accepted if a folder with the name of its scheme exists.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        is_url = re.fullmatch(r"[a-z][a-z0-9+.-]+:", path.parts[0]) and not os.path.lexists(path.parts[0])
        if is_url:
            return "is a URL, and outputs are written to this host's file systems"
        new = path.relative_to(next(place for place in path.parents if os.path.lexists(place)))
        is_home = re.fullmatch(r"~\w*", path.parts[0]) and not os.path.lexists(path.parts[0])
        unexpanded = is_home or re.search(r"\$\{?[A-Za-z_]", str(new))
        return "has a ~ or a variable that no shell has replaced, maybe for its quotes" if unexpanded else None
    except OSError as error:
        return error.strerror
    except ValueError as error:  # a NUL character
        return first_line(error)
    return None
