"""One agent per node: it starts and watches the node's ranks, together with the other agents.

The agent polls (agent), a pure function decides (policy), and the agents exchange signed values
through the store of their rendezvous (peers, signed_board). When ranks are lost during training,
the agents agree which ranks continue in place (store_consensus).

A loss is noticed in five ways, the fastest first:

- The kernel closes the connections of a killed agent at once (liveness).
- The surviving ranks of the process group see a connection close.
- torchelastic drops a node that does not reach the next rendezvous within 3 s
  (launch.RENDEZVOUS_LIMITS).
- Each agent writes a heartbeat. A node whose heartbeat stops counts as lost after 6 s if the others
  can continue in place, else after 15 s (peers).
- The kernel ends the connections to the node that serves the store after 15 s without an answer
  (launch.set_connection_timeouts). A survivor then serves the next store, once that node has also
  stopped touching the file in the run directory (run_dir_rendezvous).
"""
