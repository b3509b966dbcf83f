"""Messages as programs write them, each with the entry that `explain` must find.

About half were taken from real runs or from the installed sources of torch, h5py and safetensors.
Those of CUDA, NCCL, SSH and most of Slurm were written from memory, so they prove less.
"""

from __future__ import annotations

import pytest

from stepladder.tools.explain.explain import explain

MEETING = "could not reach MASTER_ADDR"
MISSING = "Some ranks never came to the store"
SIZES = "tensors of different sizes"
FULL_SHM = "through /dev/shm, which is full"
DAMAGED = "checkpoint is damaged"
HDF5 = "HDF5 file is damaged"
LOCKED = "has the HDF5 file open"
NO_GPU = "group is for NCCL"
PROGRAM = "environment with this program"
GRAPH = "loss has no graph"
VALUES = "label or token"
UNSENDABLE = "something that cannot be sent"
BAD_SCRIPT = "sbatch cannot read the script"
MESSAGES = [
    ("torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 2/4 clients joined.", MISSING),
    ("torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//0", MISSING),
    ("[W] [c10d] The IPv6 network addresses of (node01, 29500) cannot be retrieved (gai error: -2 - Name or service not known).", MEETING),
    ("[W socket.cpp:752] [c10d] The client socket cannot be initialized to connect to [localhost]:29500 (errno: 97 - Address family not supported by protocol).", MEETING),
    ("torch.distributed.DistNetworkError: The client socket has timed out after 1000ms while trying to connect to (127.0.0.1, 29874).", MEETING),
    ("The client socket has failed to connect to [node01]:29500 (errno: 111 - Connection refused).", MEETING),
    ("DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", "listens on MASTER_PORT"),
    ("ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set", "nobody has started it"),
    ("ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable WORLD_SIZE expected, but not set", "nobody has started it"),
    ("ValueError: Default process group has not been initialized, please make sure to call init_process_group.", "before init_process_group"),
    ("ValueError: trying to initialize the default process group twice!", "called twice in one process"),
    ("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "come to the rendezvous"),
    ("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.", "come to the rendezvous"),
    ("RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error", "not each other"),
    ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:30911", "Another rank has ended"),
    ("RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection reset by peer", "Another rank has ended"),
    ("RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete", "waited in a collective"),
    ("[enforce fail at third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 106 vs 104. Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?", SIZES),
    ("RuntimeError: ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (3), got (2))", SIZES),
    ("RuntimeError: rank 1 passes another size here than rank 0: all_gather (52 float32) in main(), train.py:33", SIZES),
    ("RuntimeError: rank 1 calls a different collective here than rank 0: barrier in main(), a.py:3", "calls are not the same"),
    ("RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=1", "different collectives"),
    ("RuntimeError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", NO_GPU),
    ("RuntimeError: Distributed package doesn't have NCCL built in", NO_GPU),
    ("RuntimeError: No backend type associated with device type cpu", NO_GPU),
    ("ValueError: Invalid usage of tensors with different dtypesFound torch.int32 and  torch.float32", "this type of number"),
    ("RuntimeError: Cannot use ReduceOp.BAND with non-integral dtype", "this type of number"),
    ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15", "torchrun was asked to end"),
    ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:", "torchrun's summary"),
    ("[E ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=87, OpType=ALLREDUCE", "within the timeout"),
    ("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "same GPU"),
    ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled system error (run with NCCL_DEBUG=INFO for details)", "could not open a connection"),
    ("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, remote process exited or there was a network error", "a consequence"),
    ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-ZfjFq1 (size 9637888)", "NCCL passes data"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.69 GiB", "do not fit"),
    ("RuntimeError: CUDA error: device-side assert triggered", "index was out of range"),
    ("RuntimeError: CUDA error: invalid device ordinal", "does not see"),
    ("AssertionError: Torch not compiled with CUDA enabled", "CPU build"),
    ("RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method", "before it forked"),
    ("RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.", "got no gradient"),
    ("RuntimeError: Expected to mark a variable ready only once.", "twice in one backward"),
    ("RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.", GRAPH),
    ("RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed).", GRAPH),
    ("RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn", GRAPH),
    ("RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation", "changed after forward"),
    ("\tUnexpected key(s) in state_dict: \"module.weight\", \"module.bias\".", "DDP wrapper"),
    ("\tsize mismatch for weight: copying a param with shape torch.Size([2, 2]) from checkpoint, the shape in current model is torch.Size([1, 1]).", "model of other sizes"),
    ("_pickle.UnpicklingError: Weights only load failed. This file can still be loaded", "only tensors and plain values"),
    ("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory", DAMAGED),
    ("RuntimeError: PytorchStreamReader failed reading zip archive: not a ZIP archive. This is an internal miniz error.", DAMAGED),
    ("RuntimeError: PytorchStreamReader failed locating file data.pkl: file not found", DAMAGED),
    ("EOFError: Ran out of input", DAMAGED),
    ("safetensors_rust.SafetensorError: Error while deserializing header: header too small", DAMAGED),
    ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", "memory ran out"),
    ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.", FULL_SHM),
    ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).", FULL_SHM),
    ("RuntimeError: unable to allocate shared memory(shm) for file </torch_5397_3955038452_4>: No space left on device (28)", FULL_SHM),
    ("RuntimeError: unable to mmap 8388608 bytes from file </torch_1_2_3>: Cannot allocate memory (12)", FULL_SHM),
    ("RuntimeError: DataLoader worker (pid(s) 20407) exited unexpectedly", "A DataLoader worker died"),
    ("RuntimeError: DataLoader timed out after 1 seconds", "DataLoader's timeout"),
    ("OSError: [Errno 24] Too many open files", "file descriptor"),
    ("AttributeError: Can't pickle local object 'main.<locals>.<lambda>'", UNSENDABLE),
    ("TypeError: cannot pickle '_io.BufferedReader' object", UNSENDABLE),
    ("RuntimeError: stack expects each tensor to be equal size, but got [2] at entry 0 and [3] at entry 1", "samples of one batch"),
    ("TypeError: default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found <class 'NoneType'>", "samples of one batch"),
    ("ValueError: sampler option is mutually exclusive with shuffle", "shuffles by itself"),
    ("IndexError: Target 7 is out of bounds.", VALUES),
    ("IndexError: index out of range in self", VALUES),
    ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x7 and 1x1)", VALUES),
    ("BlockingIOError: [Errno 11] Unable to synchronously create file (unable to lock file, errno = 11, error message = 'Resource temporarily unavailable')", LOCKED),
    ("OSError: Unable to synchronously open file (file is already open for read-only)", LOCKED),
    ("OSError: Unable to synchronously open file (truncated file: eof = 401024, sblock->base_addr = 0, stored_eof = 802048)", HDF5),
    ("OSError: Unable to synchronously open file (file signature not found)", HDF5),
    ("KeyError: 'Unable to synchronously open object (bad object header version number)'", HDF5),
    ("slurmstepd: error: execve(): python: No such file or directory", PROGRAM),
    ("/var/spool/slurmd/job00004/slurm_script: line 9: torchrun: command not found", PROGRAM),
    ("slurmstepd: error: execve(): apptainer: No such file or directory", "no such program on its PATH"),
    ("sbatch: error: Batch script contains DOS line breaks (\\r\\n)", BAD_SCRIPT),
    ("sbatch: error: This does not look like a batch script.  The first", BAD_SCRIPT),
    ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", "name of a project"),
    ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "what was asked for"),
    ("srun: error: Unable to create step for job 12: More processors requested than permitted", "more tasks or cores"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.", "more memory than it had"),
    ("slurmstepd: error: *** JOB 12 ON node01 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***", "time was over"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "cause"), MESSAGES, ids=lambda text: text[:40])
def test_a_real_message_has_its_entry(message: str, cause: str) -> None:
    causes = [occurrence.cause for occurrence in explain([message])]
    assert causes and cause in causes[0], causes
