"""python tests/as_container.py KIND COMMAND...: a command with what a container has by default.

Fewer system calls than the kernel has, by libseccomp, and fewer capabilities, by setpriv. KIND is a
key of KINDS.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

# https://docs.docker.com/engine/security/seccomp: what its profile refuses to a container without
# CAP_SYS_ADMIN, and what it gives.
REFUSED = (
    "acct add_key bpf clock_adjtime clock_settime create_module delete_module finit_module fsconfig"
    " fsmount fsopen fspick get_kernel_syms get_mempolicy init_module ioperm iopl kcmp"
    " kexec_file_load kexec_load keyctl lookup_dcookie mbind mount mount_setattr move_mount"
    " move_pages nfsservctl open_by_handle_at open_tree perf_event_open pivot_root query_module"
    " quotactl reboot request_key set_mempolicy setns settimeofday swapoff swapon sysfs umount2"
    " uselib userfaultfd ustat"
)
MAKES_NAMESPACES = "clone unshare"
KINDS = {
    "docker": f"{REFUSED} {MAKES_NAMESPACES}",
    "docker on an old kernel": f"{REFUSED} {MAKES_NAMESPACES} landlock_create_ruleset",
    # As Ubuntu's AppArmor lets users have them: nothing can be mounted there.
    "useless namespaces": REFUSED,
}
CAPABILITIES = (
    "chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service net_raw"
    " sys_chroot mknod audit_write setfcap"
)
NEW_NAMESPACES = [0x00020000, 0x02000000, *(1 << bit for bit in range(26, 31))]  # flags of clone
ALLOW = 0x7FFF0000
FAIL = 0x00050000
IS_MASKED = 7  # of libseccomp: the argument's bits under a mask have a value
UNKNOWN_CALL = -1


class Comparison(ctypes.Structure):
    """What libseccomp compares of a call."""

    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    ]


def install_filter(refused: list[str]) -> None:
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ALLOW)))

    def add(call: str, number: int, *comparisons: Comparison) -> None:
        resolved = library.seccomp_syscall_resolve_name(call.encode())
        if resolved == UNKNOWN_CALL:
            return
        array = (Comparison * len(comparisons))(*comparisons)
        code = library.seccomp_rule_add_array(
            rules, ctypes.c_uint32(FAIL | number), resolved, len(comparisons), array
        )
        assert code == 0, call

    for call in refused:
        if call != "clone":
            add(call, errno.EPERM)
            continue
        add("clone3", errno.ENOSYS)  # so that a C library takes clone, whose flags can be read
        for flag in NEW_NAMESPACES:
            add("clone", errno.EPERM, Comparison(0, IS_MASKED, flag, flag))
    assert library.seccomp_load(rules) == 0


def main(words: list[str]) -> None:
    if words[0] == "--inside":
        install_filter(KINDS[words[1]].split())
        os.execvp(words[2], words[2:])
    bounding_set = ",".join(["-all", *(f"+{name}" for name in CAPABILITIES.split())])
    limits = "--bounding-set", bounding_set, "--inh-caps", "-all"
    os.execvp("setpriv", ["setpriv", *limits, sys.executable, __file__, "--inside", *words])


if __name__ == "__main__":
    main(sys.argv[1:])
