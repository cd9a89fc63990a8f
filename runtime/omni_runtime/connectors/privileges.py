"""From root to an ordinary user that may still lock memory, which RDMA has to.

Kubernetes gives the capabilities that a container adds to root alone, and has no limit of locked memory to raise.
Linux only, and before the process has a second thread: capabilities belong to threads.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_KEEP_CAPABILITIES: Final = 8  # PR_SET_KEEPCAPS
_VERSION_3: Final = 0x20080522
_IPC_LOCK: Final = 14


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Set(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def become(user: int) -> bool:
    """This user, with the capability IPC_LOCK and no other. False: without it, too. Raises OSError where it stays root.

    Nothing where the process is not root: then it has no capability that it could keep.
    """
    if os.geteuid() != 0:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0), "keep capabilities")
    os.setresuid(user, user, user)
    if not _keep(libc, 1 << _IPC_LOCK):
        return True
    _checked(_keep(libc, 0), "give up capabilities")
    return False


def _keep(libc: ctypes.CDLL, capabilities: int) -> int:
    kept = (_Set * 2)(_Set(capabilities, capabilities, 0), _Set())
    result: int = libc.capset(ctypes.byref(_Header(_VERSION_3, 0)), kept)
    return result


def _checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"cannot {what}: {os.strerror(ctypes.get_errno())}")
