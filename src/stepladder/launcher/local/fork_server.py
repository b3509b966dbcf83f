"""Imported by the process that ranks are forked from, for what it does there: it must neither outlive its
launcher nor end before its ranks.

Ranks die with the server, and hold the pipe by which it would otherwise notice that its launcher was killed.
A signal to the whole process group (Slurm, `timeout`, a closed terminal) is for the ranks, which unblock it.
"""

from __future__ import annotations

import gc
import signal

from stepladder.rank.lifecycle import FOR_RANKS, die_with_parent

die_with_parent()
gc.disable()  # a fifth of the time that torch's import takes; each rank enables it again
signal.pthread_sigmask(signal.SIG_BLOCK, FOR_RANKS)
