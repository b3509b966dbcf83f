"""Starting ranks: on this machine, over SSH, on the nodes of a job. Imports no torch.

How the end of something is noticed. Each way is there for a case that no other one sees; a new way
needs such a case, too.

- A launcher: the kernel kills its children (core/signals). Only so end ranks, and workers of a data
  loader, whose parent was killed with SIGKILL.
- A launcher of a script: a guard whose pipe ends (local/session_guard). It ends what the ranks of a
  script have started themselves.
- A command on another machine: stdin ends (stdin). An SSH connection may be gone.
- A rank, seen by its launcher: its process ends (local/attempt), with an exit code.
- A rank, seen by ranks that share memory with it: the kernel makes a file readable
  (stepladder_exchange/process_watch.py). Memory has no connection that could close.
- A rank, seen by ranks of other machines: a connection of gloo or NCCL closes, also without a
  launcher of ours.
- A rank, seen by ranks that wait for another one, which lives and has left: its launcher tells
  (rank/membership). Without one, a word of the memory and a key of the store tell (exchange/wait,
  exchange/network).
- An agent: an open connection closes at once (nodes/liveness), while its machine runs on.
- A node: its heartbeat stops (nodes/peers). The connections of a machine without power stay open.
- A node, before a start: torchelastic drops it (nodes/launch). It does not come to the rendezvous.
- The node that serves the store: the kernel ends connections to it (nodes/launch). No heartbeat can
  be read then. Its successor also sees that it no longer touches rendezvous.json
  (nodes/run_dir_rendezvous), and so tells a lost node from one that it cannot reach.
- A run in the same directory: its lock is free, or its heartbeat is old (storage/lock). No launcher
  here knows it.
- A batch job: Slurm's state of it (slurm/requeue). No process of ours is left.
"""
