"""A small reader of 64-bit little-endian ELF files: sonames, needed libraries, symbols and their versions.

Only what the stub generator asks for. Source: System V ABI, gABI 4.1, and the GNU symbol versioning
extension (``.gnu.version``, ``.gnu.version_d``).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_SHT_SYMTAB, _SHT_DYNAMIC, _SHT_DYNSYM = 2, 6, 11
_SHT_GNU_VERDEF, _SHT_GNU_VERSYM = 0x6FFFFFFD, 0x6FFFFFFF
_DT_NEEDED, _DT_SONAME = 1, 14
_SECTION_BYTES = 64
_SHN_UNDEF, _SHN_ABS = 0, 0xFFF1
_VERSYM_HIDDEN = 0x8000


class Kind(IntEnum):
    """Symbol type (``STT_*``)."""

    NOTYPE = 0
    OBJECT = 1
    FUNC = 2
    SECTION = 3
    FILE = 4
    COMMON = 5
    TLS = 6
    IFUNC = 10


class Binding(IntEnum):
    """Symbol binding (``STB_*``)."""

    LOCAL = 0
    GLOBAL = 1
    WEAK = 2
    UNIQUE = 10


@dataclass(frozen=True, slots=True)
class Symbol:
    """One entry of a symbol table.

    Attributes:
        size: bytes of the object or function.
        version: the version node that defines it, or an empty string.
        default: whether an unversioned reference binds to it (``name@@version``).
    """

    name: str
    kind: Kind
    binding: Binding
    size: int
    defined: bool
    absolute: bool
    version: str
    default: bool


@dataclass(frozen=True, slots=True)
class ElfFile:
    """What the dynamic linker knows of a file, read once.

    Attributes:
        symbols: the dynamic symbols, or those of ``.symtab`` where the file is an object file.
    """

    path: Path
    soname: str
    needed: tuple[str, ...]
    symbols: tuple[Symbol, ...]

    def exports(self) -> Iterator[Symbol]:
        """The symbols that other files may bind to."""
        return (s for s in self.symbols if s.defined and not s.absolute and s.binding is not Binding.LOCAL)

    def imports(self) -> Iterator[Symbol]:
        """The symbols that must come from elsewhere."""
        return (s for s in self.symbols if not s.defined and s.name)


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    entry: int


def read(path: Path) -> ElfFile:
    """Reads `path`.

    Raises:
        ValueError: it is not a 64-bit little-endian ELF file, or it is cut short.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(path, data)
            except (struct.error, IndexError) as error:
                raise ValueError(f"{path} is cut short or damaged: {error}.") from error


def _parse(path: Path, data: mmap.mmap) -> ElfFile:
    table_at, entry_size, count = _section_table(data)
    if entry_size != _SECTION_BYTES or table_at + entry_size * count > len(data):
        raise ValueError(f"{path} is cut short or damaged: it has no section table.")
    sections = [
        _Section(kind, offset, size, link, entry)
        for _, kind, _, _, offset, size, link, _, _, entry in struct.iter_unpack(
            "<IIQQQQIIQQ", data[table_at : table_at + entry_size * count]
        )
    ]
    by_kind = {s.kind: s for s in sections}
    soname, needed = "", []
    if dynamic := by_kind.get(_SHT_DYNAMIC):
        for tag, value in struct.iter_unpack("<QQ", data[dynamic.offset : dynamic.offset + dynamic.size]):
            if tag in (_DT_NEEDED, _DT_SONAME):
                text = _string(data, sections[dynamic.link].offset + value)
                if tag == _DT_NEEDED:
                    needed.append(text)
                else:
                    soname = text
    table = by_kind.get(_SHT_DYNSYM) or by_kind.get(_SHT_SYMTAB)
    symbols = tuple(_symbols(data, sections, table, by_kind)) if table else ()
    return ElfFile(path, soname, tuple(needed), symbols)


def _section_table(data: mmap.mmap) -> tuple[int, int, int]:
    (table_at,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    return table_at, entry_size, count


def _symbols(
    data: mmap.mmap, sections: list[_Section], table: _Section, by_kind: dict[int, _Section]
) -> Iterator[Symbol]:
    names = sections[table.link]
    strings = data[names.offset : names.offset + names.size]
    versions = _version_names(data, sections, by_kind.get(_SHT_GNU_VERDEF))
    versym: tuple[int, ...] = ()
    if table.kind == _SHT_DYNSYM and (v := by_kind.get(_SHT_GNU_VERSYM)):
        versym = struct.unpack_from(f"<{v.size // 2}H", data, v.offset)
    raw = data[table.offset : table.offset + table.size]
    for index, (name_at, info, _, section, _, size) in enumerate(struct.iter_unpack("<IBBHQQ", raw)):
        try:
            kind, binding = Kind(info & 15), Binding(info >> 4)
        except ValueError:
            continue  # a processor's or an OS's own kind: nothing to stub
        node = versym[index] if versym else 0
        yield Symbol(
            name=strings[name_at : strings.index(b"\0", name_at)].decode(),
            kind=kind,
            binding=binding,
            size=size,
            defined=section != _SHN_UNDEF,
            absolute=section == _SHN_ABS,
            version=versions.get(node & ~_VERSYM_HIDDEN, ""),
            default=not node & _VERSYM_HIDDEN,
        )


def _version_names(data: mmap.mmap, sections: list[_Section], section: _Section | None) -> dict[int, str]:
    """Index of a version node to its name; index 1 is the file itself, not a version of symbols."""
    names: dict[int, str] = {}
    at = section.offset if section else 0
    while section:
        _, _, index, _, _, aux, following = struct.unpack_from("<HHHHIII", data, at)
        (name_at,) = struct.unpack_from("<I", data, at + aux)
        if index > 1:
            names[index] = _string(data, sections[section.link].offset + name_at)
        if not following:
            break
        at += following
    return names


def _string(data: mmap.mmap, at: int) -> str:
    return data[at : data.find(b"\0", at)].decode()
