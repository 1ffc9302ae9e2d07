"""Cuts a CUDA library down to the code of one compute capability, so that it travels as a small archive.

    python scripts/slime/keep_cubins.py LIBRARY OUT --arch 90

Duty: the fat binaries in an ELF file. Each container (magic 0xBA55ED50; 16 bytes: magic u32, version u16, header size u16,
size of what follows u64) holds entries: kind u16 (1 PTX, 2 ELF), version u16, header size u32, payload size u64, at byte 28
of the header the architecture as a u32 (90 stands for sm_90 and sm_90a alike). The entries kept move to their container's
front, the container's size shrinks to them, the rest becomes zeros: every address in the file stays as it was, nothing has to
be linked anew, and xz squeezes the zeros away. NVIDIA does not document the format; the walk refuses a container that its
entries do not fill exactly and an entry of an unknown kind. `cuobjdump -lelf OUT` lists what is left.

It does not know what the kernels are for, nor whether a driver would need PTX: on a card of another architecture the result
has no code at all.
"""

from __future__ import annotations

import argparse
import collections
import struct
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
CONTAINER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQ")
ARCH_OFFSET = 28
KINDS = (1, 2)  # PTX, ELF


def cut(data: bytearray, arch: int) -> collections.Counter[tuple[int, bool]]:
    """Cuts each container of data in place; bytes of payload by (architecture, kept).

    Raises ValueError where a container is not laid out as described above, or where none holds code for arch.
    """
    sizes: collections.Counter[tuple[int, bool]] = collections.Counter()
    position = data.find(MAGIC)
    while position >= 0:
        _, version, header, size = CONTAINER.unpack_from(data, position)
        begin, end = position + header, position + header + size
        if version != 1 or header != CONTAINER.size or end > len(data):
            raise ValueError(
                f"container at {position:#x}: version {version}, header of {header} bytes, {size} bytes to follow; expected "
                f"version 1, {CONTAINER.size} bytes and an end within the file's {len(data)}; look at it with cuobjdump"
            )
        kept = bytearray()
        entry = begin
        while entry < end:
            kind, _, entry_header, payload = ENTRY.unpack_from(data, entry)
            (entry_arch,) = struct.unpack_from("<I", data, entry + ARCH_OFFSET)
            following = entry + entry_header + payload
            if kind not in KINDS or entry_header < 64 or following > end:
                raise ValueError(
                    f"entry at {entry:#x}: kind {kind}, header of {entry_header} bytes, payload of {payload}; expected kind "
                    f"{KINDS}, a header of at least 64 and an end within its container ({end:#x}); look at it with cuobjdump"
                )
            keep = entry_arch == arch
            sizes[entry_arch, keep] += payload
            if keep:
                kept += data[entry:following]
            entry = following
        CONTAINER.pack_into(data, position, CONTAINER.unpack_from(data, position)[0], version, header, len(kept))
        data[begin:end] = kept + bytes(size - len(kept))
        position = data.find(MAGIC, end)
    if not any(keep for _, keep in sizes):
        raise ValueError(f"arch: {arch} is in no container; found {sorted({a for a, _ in sizes})}; give one of these")
    return sizes


def main() -> None:
    """Reads the command line, writes the cut library and prints the bytes of each architecture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", type=int, required=True, help="compute capability times ten, as 90")
    arguments = parser.parse_args()
    data = bytearray(arguments.library.read_bytes())
    sizes = cut(data, arguments.arch)
    arguments.out.write_bytes(data)
    for (arch, keep), size in sorted(sizes.items()):
        print(f"sm_{arch}\t{size}\t{'kept' if keep else 'blanked'}")


if __name__ == "__main__":
    main()
