"""How a rank exchanges tensors with the other ranks of its machine, in its environment."""

EXCHANGE_VARIABLE = "STEPLADDER_EXCHANGE"
MEMORY_EXCHANGE = "memory"
GLOO_EXCHANGE = "gloo"
