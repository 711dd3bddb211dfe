"""Take from this process, for good, the right to change anything outside one folder, to send, and to signal others.

Linux: Landlock for files, TCP and signals, a seccomp filter for what Landlock leaves out (sockets, owners and modes,
attributes, IPC, keys, io_uring, which goes past seccomp), and no capabilities. All of it works without privileges and
in containers, and holds for every thread and program that is started afterwards. macOS: a sandbox profile.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from glob import glob

_WRITE_FILE, _REMOVE_DIR, _REMOVE_FILE = 1 << 1, 1 << 4, 1 << 5
_MAKE = sum(1 << bit for bit in range(6, 13))  # devices, folders, files, sockets, pipes, links
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15  # linux/landlock.h: LANDLOCK_ACCESS_FS_…
_RIGHTS = {1: _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE, 2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV}  # since ABI …
_TCP = 0b11  # bind, connect; since ABI 4
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11  # since ABI 6
# Devices whose files keep nothing: nvidia-smi is asked. Without capabilities a driver changes no settings.
_CARDS = ("/dev/nvidia*", "/dev/dri/*", "/dev/kfd")

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # SECCOMP_RET_…
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, AUDIT_ARCH_…

# Numbers of system calls on x86_64 and aarch64 (None: not there); since 424 they are the same everywhere.
# Modes, owners and times of files, priorities and cores of processes: they seem to succeed, so that what copies or
# unpacks files, or is nice, does.
_IGNORED = {
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    **{"chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54)},
    **{"utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88)},
    **{"setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122)},
    **{"sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274)},
}
_DENIED = {
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466)},
    "file_setattr": (469, 469),
    **{"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201)},
    **{"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "mq_unlink": (241, 181)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    **{"ptrace": (101, 117), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438)},
    **{
        "open_by_handle_at": (304, 265),
        "io_uring_setup": (425, 425),
        "bpf": (321, 280),
        "perf_event_open": (298, 241),
    },
    **{"mount": (165, 40), "umount2": (166, 39), "move_mount": (429, 429), "mount_setattr": (442, 442)},
    **{"unshare": (272, 97), "setns": (308, 268)},
    **{"setsid": (112, 157), "setpgid": (109, 154)},  # the group is ended as a whole
    **{"migrate_pages": (256, 238), "move_pages": (279, 239), "process_madvise": (440, 440)},
}
# Of other processes: the argument that names one.
_OF_ITSELF_ONLY = {"prlimit64": (0, 302, 261)}
# Where Landlock has no scope for signals (before ABI 6). setsid() has made the process its group's leader.
_SIGNALS = {
    **{"kill": (0, 62, 129), "tgkill": (0, 234, 131), "rt_sigqueueinfo": (0, 129, 138)},
    "rt_tgsigqueueinfo": (0, 297, 240),
}
_OTHER_SIGNALS = {"tkill": (200, 130), "pidfd_send_signal": (424, 424)}
# Where Landlock does not know truncation (before ABI 3).
_TRUNCATION = {"truncate": (76, 45), "openat2": (437, 437)}
_OPENINGS = {"open": (1, 2, None), "openat": (2, 257, 56)}
# ioctl() on a file that is only open for reading: flags (f, X, v) and btrfs's snapshots; keys typed into a terminal.
_FILE_IOCTLS = [ord(kind) << 8 for kind in "fXv"] + [0x9400]
_TERMINAL_IOCTLS = [0x5412, 0x541C]  # TIOCSTI, TIOCLINUX

_MACOS_PROFILE = """(version 1)
(allow default)
(deny file-write*)
(allow file-write* (subpath "{folder}"))
(allow file-write-data (literal "/dev/null"))
(deny network*)
(deny signal)
(allow signal (target pgrp))
"""


def confine(folder: str) -> str | None:
    """Confine this process, which must have one thread and lead its session, to writing in one folder.

    Returns:
        None, or why this system cannot: then nothing was taken away.
    """
    if sys.platform == "darwin":
        return _confine_macos(folder)
    if reason := cannot_confine():
        return reason
    abi = landlock_abi()
    _drop_capabilities()
    _landlock(abi, folder)
    _seccomp(_filter(abi))
    return None


def cannot_confine() -> str | None:
    """The reason that this system cannot confine a process, or None."""
    if sys.platform == "darwin":
        return None
    if sys.platform != "linux":
        return f"{platform.system()} offers nothing that hf_memopt could use for it"
    if platform.machine() not in _MACHINES or sys.maxsize < 2**32:
        return f"its filter of system calls is for {' and '.join(_MACHINES)}, not {platform.machine()}"
    if landlock_abi() < 1:
        return "this kernel or container does not offer Landlock (Linux 5.13 and later do)"
    return None


def may_have_card() -> bool:
    """True if there may be an accelerator whose driver a confined process cannot start (Linux)."""
    return bool(_paths(*_CARDS))


def _paths(*patterns: str) -> list[str]:
    return [path for pattern in patterns for path in glob(pattern) if not os.path.isdir(path)]


def landlock_abi() -> int:
    """The kernel's version of Landlock; 0 where there is none, or where a container forbids it."""
    try:
        return _syscall(444, None, 0, 1)
    except OSError:
        return 0


def _syscall(number: int, *arguments) -> int:
    """A system call.

    Raises:
        OSError: it failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_long(part) if isinstance(part, int) else part for part in arguments]
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _prctl(option: int, *arguments) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_ulong(part) if isinstance(part, int) else part for part in (*arguments, 0, 0, 0, 0)[:4]]
    if libc.prctl(ctypes.c_int(option), *words) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        _prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
        if os.getppid() != parent:  # it ended before that
            os._exit(1)


def _drop_capabilities() -> None:
    """Root without its capabilities is a user like any other. Reading everything is left to it."""
    reading = 1 << 2  # CAP_DAC_READ_SEARCH
    _prctl(38, 1)  # PR_SET_NO_NEW_PRIVS: programs that are started do not get them back
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    held = ctypes.create_string_buffer(24)
    capget, capset = {"x86_64": (125, 126), "aarch64": (90, 91)}[platform.machine()]
    _syscall(capget, header, held)
    effective, permitted = struct.unpack_from("II", held.raw)
    _syscall(capset, header, struct.pack("6I", effective & reading, permitted & reading, 0, 0, 0, 0))


def _landlock(abi: int, folder: str) -> None:
    rights = sum(right for since, right in _RIGHTS.items() if since <= abi)
    net, scoped = _TCP * (abi >= 4), _ABSTRACT_SOCKETS_AND_SIGNALS * (abi >= 6)
    # An older kernel takes the longer struct, if what it does not know is 0.
    ruleset = _syscall(444, struct.pack("QQQ", rights, net, scoped), 24, 0)
    _allow(ruleset, folder, rights)
    for path in _paths("/dev/null", *_CARDS):
        _allow(ruleset, path, rights & (_WRITE_FILE | _TRUNCATE | _IOCTL_DEV))
    _syscall(446, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _syscall(445, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


def _seccomp(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    _prctl(22, 2, ctypes.byref(_Program(len(program) // 8, ctypes.addressof(code))))  # PR_SET_SECCOMP, …_MODE_FILTER


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def _filter(abi: int) -> bytes:
    """The program that decides on each system call. Of struct seccomp_data it reads the number (at 0), the machine (4)
    and the lower halves of the arguments (from 16 on)."""
    column, machine = _MACHINES[platform.machine()]
    deny = _return(errno.EPERM)
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), deny, (_LOAD, 0, 0, 0)]  # a 32-bit program's calls
    program += [(_AT_LEAST, 0, 1, 0x40000000), deny]  # x32's
    denied, own = dict(_DENIED), dict(_OF_ITSELF_ONLY)
    if abi < 3:
        denied |= _TRUNCATION
    if abi < 6:
        denied, own = denied | _OTHER_SIGNALS, own | _SIGNALS
    for numbers in _IGNORED.values():
        program += _on(numbers[column], [_return(0)])
    for numbers in denied.values():
        program += _on(numbers[column], [deny])
    for name, (place, *numbers) in own.items():
        program += _on(numbers[column], _of_itself(name, place))
    if abi < 3:  # O_TRUNC with O_RDONLY needs no right to write
        for place, *numbers in _OPENINGS.values():
            program += _on(numbers[column], [_argument(place), (_AND, 0, 0, 0o1003), *_unless(0o1000, deny)])
    # Both ends of a pair are here. A datagram names its receiver, so it has none; a stream's is the other end.
    unix_stream = [_argument(0), (_EQUAL, 1, 0, 1), deny, _argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, 1), deny]
    program += _on((53, 199)[column], unix_stream)
    ioctl = [_argument(1)] + [step for kind in _TERMINAL_IOCTLS for step in _unless(kind, deny)]
    ioctl += [(_AND, 0, 0, 0xFF00)]
    ioctl += [step for kind in _FILE_IOCTLS for step in _unless(kind, _return(errno.ENOTTY))]
    program += _on((16, 29)[column], ioctl)
    return b"".join(struct.pack("HBBI", *step) for step in [*program, (_RETURN, 0, 0, _ALLOW)])


def _return(error: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ERRNO | error)


def _argument(place: int) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, 16 + 8 * place)


def _unless(value: int, step: tuple) -> list[tuple]:
    return [(_EQUAL, 0, 1, value), step]


def _on(number: int | None, steps: list[tuple]) -> list[tuple]:
    """Steps for one system call; the last of them that is reached decides, and where none does, it is allowed."""
    if number is None:
        return []
    return [(_EQUAL, 0, len(steps) + 1, number), *steps, (_RETURN, 0, 0, _ALLOW)]


def _of_itself(name: str, place: int) -> list[tuple]:
    """Allow an argument of 0 or this process, and a kill() of its own group."""
    allowed = [0, os.getpid()] + ([2**32 - os.getpid()] if name == "kill" else [])
    tests = [(_EQUAL, len(allowed) - index, 0, value) for index, value in enumerate(allowed)]
    return [_argument(place), *tests, _return(errno.EPERM)]


def _confine_macos(folder: str) -> str | None:
    """The profile of sandbox-exec(1), put on this process."""
    library, message = ctypes.CDLL("/usr/lib/libSystem.B.dylib"), ctypes.c_char_p()
    if library.sandbox_init(macos_profile(folder).encode(), ctypes.c_uint64(0), ctypes.byref(message)):
        return f"macOS refuses the sandbox profile: {(message.value or b'').decode(errors='replace')}"
    return None


def macos_profile(folder: str) -> str:
    """The sandbox profile for writing in one folder.

    Raises:
        ValueError: the folder's path cannot be written in a profile.
    """
    if set(folder) & set('"\\\n'):
        raise ValueError(f"{folder}: a sandbox profile cannot name this folder")
    return _MACOS_PROFILE.format(folder=os.path.realpath(folder))
