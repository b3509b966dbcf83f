"""Tries to change files outside of its copy, in more than thirty ways. argv: the folder outside; the harms to skip.

It prints what became of each, and ends with exit code 9, so that the check shows what was printed.
"""

import ctypes
import ctypes.util
import gzip
import json
import mmap
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

OUT, SKIPPED = Path(sys.argv[1]), sys.argv[2].split(",")
LIBC = ctypes.CDLL(None, use_errno=True)
HARMS = {}


def harm(function):
    HARMS[function.__name__] = function
    return function


def run(*command, **options):
    return subprocess.run(command, check=True, stderr=subprocess.DEVNULL, **options)


def c(function, *args):
    if getattr(LIBC, function)(*args) < 0:
        raise OSError(ctypes.get_errno(), function)


@harm
def open_to_write(out):
    (out / "a").open("w").write("changed")


@harm
def open_to_append_by_bytes(out):
    open(os.fsencode(out / "b"), "ab").write(b"changed")


@harm
def open_in_place(out):
    open(out / "c", "r+").write("changed")


@harm
def remove(out):
    os.remove(out / "d")


@harm
def unlink_by_bytes(out):
    os.unlink(os.fsencode(out / "e"))


@harm
def rename_outside(out):
    os.rename(out / "f", out / "renamed")


@harm
def replace_by_a_file_of_the_copy(out):
    Path("new").write_text("changed")
    os.replace("new", out / "g")


@harm
def remove_a_tree(out):
    shutil.rmtree(out / "tree")


@harm
def truncate(out):
    os.truncate(out / "h", 1)


@harm
def change_mode(out):
    os.chmod(out / "i", 0o777)


@harm
def change_times(out):
    os.utime(out / "j", (1, 1))


@harm
def make_folder(out):
    os.makedirs(out / "made" / "deeper")


@harm
def remove_folder(out):
    os.rmdir(out / "empty")


@harm
def make_link(out):
    os.symlink("/", out / "link")


@harm
def make_pipe(out):
    os.mkfifo(out / "pipe")


@harm
def write_through_a_hard_link(out):
    os.link(out / "k", "hard")
    Path("hard").write_text("changed")


@harm
def make_hard_link_outside(out):
    os.link(out / "l", out / "second")


@harm
def open_in_a_folder_by_descriptor(out):
    folder = os.open(out, os.O_RDONLY)
    os.open("m", os.O_WRONLY | os.O_TRUNC, dir_fd=folder)


@harm
def unlink_in_a_folder_by_descriptor(out):
    os.unlink("n", dir_fd=os.open(out, os.O_RDONLY))


@harm
def rename_in_a_folder_by_descriptor(out):
    folder = os.open(out, os.O_RDONLY)
    os.rename("o", "moved", src_dir_fd=folder, dst_dir_fd=folder)


@harm
def open_through_a_descriptor(out):
    Path(f"/proc/self/fd/{os.open(out, os.O_PATH)}/p").write_text("changed")


@harm
def map_into_memory(out):
    with open(out / "q", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[0:1] = b"!"


@harm
def database_row(out):
    with sqlite3.connect(out / "rows.db") as database:
        database.execute("insert into t values (2)")


@harm
def new_database(out):
    sqlite3.connect(out / "new.db").execute("create table t (x)")


@harm
def copy_over(out):
    shutil.copy(__file__, out / "r")


@harm
def move_away(out):
    shutil.move(out / "s", "taken")


@harm
def relative_path_upwards(out):
    Path(os.path.relpath(out / "t")).write_text("changed")


@harm
def link_of_the_copy(out):
    Path("outside/u").write_text("changed")


@harm
def link_made_on_the_way(out):
    Path("way").symlink_to(out / "v")
    Path("way").write_text("changed")


@harm
def program_cp(out):
    run("cp", __file__, out / "w")


@harm
def program_rm(out):
    run("rm", "-rf", out / "x")


@harm
def program_chmod(out):
    run("chmod", "777", out / "y")


@harm
def program_touch(out):
    run("touch", "-d", "2001-01-01", out / "z")


@harm
def shell(out):
    if os.system(f"echo changed > {out}/A 2> /dev/null"):
        raise OSError("refused")


@harm
def program_started_by_posix_spawn(out):
    process = os.posix_spawn("/bin/rm", ["rm", "-f", str(out / "B")], os.environ)
    if os.waitpid(process, 0)[1]:
        raise OSError("refused")


@harm
def python_of_its_own(out):
    run(sys.executable, "-c", f"open({str(out / 'C')!r}, 'w')")


@harm
def bare_python(out):
    run(sys.executable, "-ISc", f"open({str(out / 'D')!r}, 'w')")


@harm
def fork(out):
    child = os.fork()
    if child == 0:
        try:
            (out / "E").write_text("changed")
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@harm
def thread(out):
    writer = threading.Thread(target=lambda: gzip.open(out / "F", "wb").close())
    threading.excepthook = lambda args: None
    writer.start()
    writer.join()


@harm
def unlink_by_c(out):
    c("unlink", os.fsencode(out / "G"))


@harm
def open_by_c(out):
    c("open", os.fsencode(out / "H"), os.O_WRONLY | os.O_TRUNC)


@harm
def chmod_by_c(out):
    c("chmod", os.fsencode(out / "I"), 0o777)


@harm
def pickle_dump(out):
    pickle.dump({}, (out / "J").open("wb"))


@harm
def attribute(out):
    os.setxattr(out / "K", "user.changed", b"yes")


@harm
def folder_of_the_launcher(out):
    Path(f"/proc/{os.getppid()}/root{out}/L").write_text("changed")


@harm
def folder_of_the_first_process(out):
    Path(f"/proc/1/root{out}/M").write_text("changed")


@harm
def unmount(out):
    run("umount", "-l", "/proc/self/root/tmp")
    (out / "N").write_text("changed")


@harm
def mount_to_be_written(out):
    run("mount", "-o", "remount,bind,rw", "/")
    (out / "O").write_text("changed")


@harm
def rename_the_folder(out):
    os.rename(out / "folder", out / "other")


@harm
def the_own_folder_by_its_path(out):
    (out.parent / "folder" / "mine").write_text("changed")


@harm
def numpy_file(out):
    import numpy

    numpy.ones(3).tofile(out / "P")


@harm
def numpy_mapped(out):
    import numpy

    numpy.memmap(out / "Q", mode="r+")[0] = 33


@harm
def torch_save(out):
    import torch

    torch.save({"epoch": 1}, out / "snapshot.pt")


@harm
def torch_jit_save(out):
    import torch

    torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.zeros(1, 1)), str(out / "traced.pt"))


@harm
def tensors_of_safetensors(out):
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(2)}, out / "model.safetensors")


@harm
def hdf5(out):
    import h5py

    h5py.File(out / "data.h5", "a")["new"] = [1]


if __name__ == "__main__":
    signal.alarm(120)
    became = {}
    for name, function in HARMS.items():
        if name in SKIPPED:
            continue
        try:
            function(OUT)
            became[name] = "done"
        except Exception as error:
            became[name] = f"{type(error).__name__}: {error}"[:36]
    print("\n" + json.dumps(became, separators=(",", ":")), flush=True)
    sys.exit(9)
