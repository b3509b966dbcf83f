"""The former home of the back end, which is the package stepladder_exchange now.

`import stepladder.exchange` registers the back end for one more release, with a warning.
"""

import warnings

import stepladder_exchange

__all__ = ["stepladder_exchange"]

warnings.warn(
    "stepladder.exchange is the package stepladder_exchange now: import stepladder_exchange",
    DeprecationWarning,
    stacklevel=2,
)
