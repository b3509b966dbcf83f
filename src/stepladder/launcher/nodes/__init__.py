"""One agent per node: it starts and watches the node's ranks, together with the other agents.

The agent polls (agent), a pure function decides (policy), and the agents exchange signed values
through the store of their rendezvous (peers, signed_board). When ranks are lost during training,
the agents agree which ranks continue in place (store_consensus).

A loss is noticed in five ways, which the package above lists with their reasons. The fastest is
a connection between agents, which the kernel closes at once (liveness). torchelastic drops a node
that does not reach the next rendezvous within 3 s (launch.RENDEZVOUS_LIMITS). A node whose
heartbeat stops counts as lost after 6 s if the others can continue in place, else after 15 s
(peers).
"""
