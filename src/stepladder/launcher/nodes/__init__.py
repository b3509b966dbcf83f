"""One node of several: where nodes meet, and the agent that starts this node's ranks."""
