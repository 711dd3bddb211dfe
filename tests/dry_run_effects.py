"""A training script that tries to change, send and disturb what it can before it trains: `SCRIPT FOLDER JSON`.

Each effect prints `name<TAB>outcome`: "done" where nothing was raised, else the error's class. What is "done" must
have been redirected. The JSON names what the test watches: ports, sockets, a process, an inherited descriptor.
"""

import atexit
import contextlib
import ctypes
import errno
import json
import mmap
import multiprocessing
import os
import shelve
import shutil
import socket
import sqlite3
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
import zipfile
from http.client import HTTPConnection
from pathlib import Path

import numpy
import pyarrow
import pyarrow.csv
import pyarrow.feather
import pyarrow.fs
import pyarrow.orc
import pyarrow.parquet
import safetensors.numpy
from huggingface_hub.utils import get_session
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

V = sys.argv[1] + "/"
WATCHED = json.loads(sys.argv[2])
HTTP = f"http://127.0.0.1:{WATCHED['tcp']}/"
TABLE = pyarrow.table({"a": [1]})
libc = ctypes.CDLL(None, use_errno=True)
folder = os.open(V, os.O_RDONLY)


def c(function, *arguments):
    """A function of the C library: what Python's own functions and their replacements do not see."""
    words = [os.fsencode(part) if isinstance(part, str) else part for part in arguments]
    if getattr(libc, function)(*words) == -1:
        raise OSError(ctypes.get_errno(), errno.errorcode[ctypes.get_errno()])


def call(number, *arguments):
    c("syscall", number, *arguments)


def sent(kind, address, family=socket.AF_INET):
    with socket.socket(family, kind) as end:
        end.connect(address)
        end.send(b"secret")


def over_pair():
    """A datagram pair needs no socket(), and each datagram may name another receiver."""
    near, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    near.sendto(b"secret", WATCHED["unix"])


def mapped():
    with open(V + "keep", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:4] = b"MMAP"


def mapped_in_c():
    descriptor = libc.open(os.fsencode(V + "keep"), os.O_RDWR)
    if descriptor < 0:
        raise PermissionError
    mmap.mmap(descriptor, 4)[:4] = b"MMAP"


def database():
    with sqlite3.connect(V + "data.sqlite") as connection:
        connection.execute("create table t (a)")


def shelf():
    with shelve.open(V + "shelf") as opened:
        opened["a"] = 1


def archived():
    with zipfile.ZipFile(V + "a.zip", "w") as archive:
        archive.writestr("inside", "x")
    with zipfile.ZipFile(V + "a.zip") as archive:
        archive.extractall(V + "unzipped")
    with tarfile.open(V + "a.tar", "w") as archive:
        archive.add(V + "a.zip", "keep")
    with tarfile.open(V + "a.tar") as archive:
        archive.extractall(V, filter="data")


def through_link():
    os.symlink(V + "keep", V + "latest")
    with open(V + "latest", "a") as file:
        file.write("CHANGED")


def touched():
    """Which first asks for the time of a file that is not there."""
    Path(V + "touched").touch()
    os.stat(V + "touched")


def without_name():
    descriptor = os.open(V, os.O_TMPFILE | os.O_WRONLY)
    os.link(f"/proc/self/fd/{descriptor}", V + "tmpfile")


def reopened():
    """What is open for reading, opened again for writing."""
    descriptor = libc.open(os.fsencode(V + "keep"), os.O_RDONLY)
    c("ftruncate", libc.open(f"/proc/self/fd/{descriptor}".encode(), os.O_RDWR), 0)


def copied_by_kernel(function):
    with open("/proc/self/exe", "rb") as source:
        target = libc.open(os.fsencode(V + "copied"), os.O_CREAT | os.O_WRONLY, 0o644)
        if target < 0:
            raise PermissionError
        function(source.fileno(), target)


def in_fork():
    child = os.fork()
    if child == 0:
        try:
            c("unlink", V + "keep")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    raise PermissionError if Path(V + "keep").exists() else None


def in_process():
    process = multiprocessing.get_context("fork").Process(target=c, args=("unlink", V + "keep"))
    process.start()
    process.join()
    raise PermissionError if process.exitcode else None


def in_thread():
    errors = []

    def run():
        try:
            c("unlink", V + "keep")
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise errors[0]


def by_shell(command):
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)


def in_background():
    def run():
        while True:
            for write in (lambda: c("unlink", V + "keep"), lambda: open(V + "late", "w").close()):
                with contextlib.suppress(OSError):
                    write()
            time.sleep(0.01)

    threading.Thread(target=run, daemon=True).start()


def at_exit():
    atexit.register(lambda: open(V + "at-exit", "w").close())


def left_behind():
    """A program that goes on when the script has ended."""
    subprocess.Popen(["sh", "-c", f"while :; do echo x 2>/dev/null > {V}late; sleep 0.01; done"])


def daemon():
    subprocess.Popen(["sleep", "60"], start_new_session=True)


EFFECTS = {
    # Python's functions
    "open": lambda: open(V + "new", "w").close(),
    "append": lambda: print("x", file=Path(V + "keep").open("a")),  # noqa: SIM115
    "io.FileIO": lambda: __import__("_io").FileIO(V + "raw", "w"),
    "touch": touched,
    "makedirs": lambda: os.makedirs(V + "made/deep"),
    "remove": lambda: os.remove(V + "keep3"),
    "rmtree": lambda: shutil.rmtree(V + "sub"),
    "move": lambda: shutil.move(V + "keep2", V + "moved"),
    "copy": lambda: shutil.copy2(V + "keep", V + "copy"),
    "hard link": lambda: os.link(V + "keep", V + "linked"),
    "through a link": through_link,
    "mmap": mapped,
    "truncate": lambda: os.truncate(V + "keep", 0),
    "archives": archived,
    "numpy.save": lambda: numpy.save(V + "a.npy", numpy.zeros(2)),
    "numpy.memmap": lambda: numpy.memmap(V + "a.npy", mode="r+").fill(0),
    # with a folder's descriptor, which they do not redirect
    "unlink at": lambda: os.unlink("keep", dir_fd=folder),
    "mkdir at": lambda: os.mkdir("at", dir_fd=folder),
    "open at": lambda: os.open("at", os.O_CREAT | os.O_WRONLY, dir_fd=folder),
    "rename at": lambda: os.rename("keep", "renamed", src_dir_fd=folder, dst_dir_fd=folder),
    "symlink at": lambda: os.symlink("keep", "at", dir_fd=folder),
    "without a name": without_name,
    "mkfifo": lambda: os.mkfifo(V + "fifo"),
    "mknod": lambda: os.mknod(V + "node"),
    # libraries in C, C++ and Rust
    "pyarrow.fs": lambda: pyarrow.fs.LocalFileSystem().delete_file(V + "keep"),
    "pyarrow.fs move": lambda: pyarrow.fs.LocalFileSystem().move(V + "keep", V + "gone"),
    "pyarrow.OSFile": lambda: pyarrow.OSFile(V + "keep", "w"),
    "pyarrow.csv": lambda: pyarrow.csv.write_csv(TABLE, V + "a.csv"),
    "pyarrow.feather": lambda: pyarrow.feather.write_feather(TABLE, V + "a.feather"),
    "pyarrow.orc": lambda: pyarrow.orc.write_table(TABLE, V + "a.orc"),
    "pyarrow.parquet": lambda: pyarrow.parquet.write_table(TABLE, V + "a.parquet"),
    "safetensors.numpy": lambda: safetensors.numpy.save_file({"a": numpy.zeros(2)}, V + "a.safetensors"),
    "tokenizers": lambda: Tokenizer(models.BPE()).model.save(V),
    "sqlite3": database,
    "shelve": shelf,
    # the C library
    "unlink": lambda: c("unlink", V + "keep"),
    "rename": lambda: c("rename", V + "keep", V + "renamed"),
    "link": lambda: c("link", V + "keep", V + "linked"),
    "creat": lambda: c("creat", V + "created", 0o644),
    "truncate in C": lambda: c("truncate", V + "keep", ctypes.c_long(0)),
    "mmap in C": mapped_in_c,
    "open again": reopened,
    "sendfile": lambda: copied_by_kernel(lambda source, target: os.sendfile(target, source, 0, 9)),
    "copy_file_range": lambda: copied_by_kernel(lambda source, target: os.copy_file_range(source, target, 9)),
    "chmod": lambda: c("chmod", V + "keep", 0o777),
    "fchmod": lambda: os.fchmod(os.open(V + "keep", os.O_RDONLY), 0o777),
    "chown": lambda: c("chown", V + "keep", 12, 12),
    "utimes": lambda: c("utimes", V + "keep", None),
    "futimens": lambda: c("futimens", os.open(V + "keep", os.O_RDONLY), None),
    "setxattr": lambda: c("setxattr", V + "keep", "user.new", b"1", ctypes.c_size_t(1), 0),
    "fremovexattr": lambda: os.removexattr(os.open(V + "keep", os.O_RDONLY), "user.old"),
    "chattr": lambda: c("ioctl", folder, ctypes.c_ulong(0x40086602), ctypes.byref(ctypes.c_long(0x40))),
    "io_uring": lambda: call(425, 8, ctypes.create_string_buffer(120)),
    # other processes and threads
    "fork": in_fork,
    "process": in_process,
    "thread": in_thread,
    "shell": lambda: by_shell(f"rm {V}keep"),
    "shell mv": lambda: by_shell(f"mv {V}keep {V}gone"),
    "in the background": in_background,
    "at exit": at_exit,
    "left behind": left_behind,
    "daemon": daemon,
    "kill": lambda: os.kill(WATCHED["process"], 9),
    "kill the parent": lambda: os.kill(os.getppid(), 15),
    "kill by descriptor": lambda: call(424, os.pidfd_open(WATCHED["process"]), 9, None, 0),
    "limits": lambda: __import__("resource").prlimit(WATCHED["process"], 7, (10, 10)),
    "memory": lambda: os.write(os.open(f"/proc/{os.getppid()}/mem", os.O_WRONLY), b"x"),
    "ptrace": lambda: c("ptrace", 16, WATCHED["process"], None, None),
    "inherited": lambda: os.write(WATCHED["descriptor"], b"CHANGED"),
    # memory and queues that outlive a process
    "shm_open": lambda: c("shm_open", "/hf-memopt-test", os.O_CREAT | os.O_RDWR, 0o600),
    "semaphore": lambda: multiprocessing.Semaphore(),
    "System V": lambda: c("shmget", 0x5EC2E7, ctypes.c_size_t(4096), 0o1600),
    "message queue": lambda: c("msgget", 0x5EC2E7, 0o1600),
    "keyring": lambda: call(248, b"user", b"hf-memopt", b"x", ctypes.c_size_t(1), -4),
    # the network
    "TCP": lambda: sent(socket.SOCK_STREAM, ("127.0.0.1", WATCHED["tcp"])),
    "UDP": lambda: sent(socket.SOCK_DGRAM, ("127.0.0.1", WATCHED["udp"])),
    "Unix socket": lambda: sent(socket.SOCK_DGRAM, WATCHED["unix"], socket.AF_UNIX),
    "abstract socket": lambda: sent(socket.SOCK_DGRAM, WATCHED["abstract"], socket.AF_UNIX),
    "datagram pair": over_pair,
    "listen": lambda: socket.create_server(("127.0.0.1", 0)),
    "http.client": lambda: HTTPConnection("127.0.0.1", WATCHED["tcp"], timeout=5).request("POST", "/", b"secret"),
    "urllib": lambda: urllib.request.urlopen(HTTP, b"secret", timeout=5),
    "the hub's POST": lambda: get_session().post(HTTP + "api/repos/create", json={"name": "secret"}),
    "another host": lambda: get_session().get(f"http://127.0.0.2:{WATCHED['tcp']}/"),
}

if __name__ == "__main__":
    for name, effect in EFFECTS.items():
        try:
            effect()
        except Exception as error:
            print(f"{name}\t{type(error).__name__}", flush=True)
        else:
            print(f"{name}\tdone", flush=True)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=120))
    rows = [{"input_ids": [1] * 16, "labels": [1] * 16}] * 8
    Trainer(model, TrainingArguments(V + "out", report_to="none", use_cpu=True), train_dataset=rows).train()
