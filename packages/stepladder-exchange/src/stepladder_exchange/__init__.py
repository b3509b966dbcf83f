"""Collectives of CPU ranks through memory that they share, as a back end of torch.distributed.

Importing this package registers the back end: `init_process_group("stepladder")`. It imports
neither torch nor the back end: torch gets to know the name as soon as torch.distributed is
imported, and the modules that exchange tensors are imported when the first group is made.
"""

from stepladder_exchange.backend import register_backend

__version__ = "0.1.0"

register_backend()
